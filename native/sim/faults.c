/* Faults on demand: what real machines have been seen to do wrong, see XD_SIM_FAULTS. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

const char *xd_sim_fault_name(int kind)
{
    static const char *const names[] = {
#define NAME(name, text) #text,
        XD_SIM_FAULTS(NAME)
#undef NAME
    };
    return kind >= 0 && kind < XD_SIM_FAULT_KINDS ? names[kind] : NULL;
}

/* ---- which operation is hit ---- */

static bool fits(int wanted, int given)
{
    return wanted == XD_SIM_ANY || given == XD_SIM_ANY || wanted == given;
}

sim_fault *sim_fault_hits(sim *s, int kind, int from, int to)
{
    sim_fault *hit = NULL;
    for (size_t i = 0; i < s->fault_count; i++) {
        sim_fault *fault = &s->faults[i];
        if (fault->is.kind != kind || !fits(fault->is.from, from) || !fits(fault->is.to, to))
            continue;
        fault->seen++;
        bool on = fault->seen >= fault->is.first && (!fault->is.count || fault->seen - fault->is.first < fault->is.count);
        if (on && !hit)
            hit = fault;
    }
    return hit;
}

void sim_fault_assign(sim *s, sim_op *op)
{
    if (!s->fault_count)
        return;
    int device = op->stream->device;
    op->loses = sim_fault_hits(s, XD_SIM_LOSE_DEVICE, device, XD_SIM_ANY);
    if (op->kind == SIM_KERNEL) {
        op->hangs = sim_fault_hits(s, XD_SIM_HANG_KERNEL, device, XD_SIM_ANY);
        sim_fault *slow = sim_fault_hits(s, XD_SIM_SLOW_KERNEL, device, XD_SIM_ANY);
        if (slow)
            op->duration *= slow->is.value;
    } else if (op->kind == SIM_COPY) {
        int from = op->u.transfer.src_device, to = op->u.transfer.dst_device;
        op->hangs = sim_fault_hits(s, XD_SIM_HANG_COPY, from, to);
        for (int kind = XD_SIM_DROP; kind <= XD_SIM_ALIAS; kind++) {
            sim_fault *fault = sim_fault_hits(s, kind, from, to);
            if (fault && !op->spoiler)
                op->spoiler = fault;
        }
    }
}

/* ---- bytes of a transfer, counted without the gaps between its rows ---- */

static unsigned char *at(uint64_t address, uint64_t pitch, const xd_transfer *t, uint64_t offset)
{
    return (unsigned char *)(uintptr_t)(address + offset / t->width * pitch + offset % t->width);
}

static unsigned char *dst_at(const xd_transfer *t, uint64_t offset)
{
    return at(t->dst, t->dst_pitch, t, offset);
}

static unsigned char *src_at(const xd_transfer *t, uint64_t offset)
{
    return at(t->src, t->src_pitch, t, offset);
}

/* How many bytes from here on lie together on both sides. */
static uint64_t together(const xd_transfer *t, uint64_t offset, uint64_t bytes)
{
    uint64_t row = t->width - offset % t->width;
    return bytes < row ? bytes : row;
}

static void move(const xd_transfer *t, uint64_t dst, uint64_t src, uint64_t bytes)
{
    for (uint64_t done = 0, step; done < bytes; done += step) {
        step = together(t, src + done, together(t, dst + done, bytes - done));
        memmove(dst_at(t, dst + done), src_at(t, src + done), step);
    }
}

static void gather(unsigned char *out, const xd_transfer *t, uint64_t bytes)
{
    for (uint64_t done = 0, step; done < bytes; done += step) {
        step = together(t, done, bytes - done);
        memcpy(out + done, src_at(t, done), step);
    }
}

static void scatter(const xd_transfer *t, const unsigned char *from, uint64_t bytes)
{
    for (uint64_t done = 0, step; done < bytes; done += step) {
        step = together(t, done, bytes - done);
        memcpy(dst_at(t, done), from + done, step);
    }
}

/* ---- spoilers ---- */

static void zero(const xd_transfer *t, uint64_t bytes)
{
    for (uint64_t done = 0, step; done < bytes; done += step) {
        step = together(t, done, bytes - done);
        memset(dst_at(t, done), 0, step);
    }
}

static void swap(const xd_transfer *t, uint64_t bytes, uint64_t tile)
{
    move(t, 0, 0, bytes);
    if (!tile || bytes < 2 * tile)
        return;
    move(t, 0, tile, tile);
    move(t, tile, 0, tile);
}

static void alias(const xd_transfer *t, uint64_t bytes, uint64_t period)
{
    for (uint64_t done = 0, step; done < bytes; done += step) {
        step = period && bytes - done > period ? period : bytes - done;
        move(t, done, 0, step);
    }
}

/* Into the guard of whoever has one; never out of the allocation. */
static void overrun(const sim *s, const sim_op *op, const xd_transfer *t, uint64_t bytes)
{
    move(t, 0, 0, bytes);
    unsigned char *next = dst_at(t, bytes - 1) + 1;
    if (!sim_memory_check(s, t->dst_device, (uint64_t)(uintptr_t)next, 1, op->seq, "copy", NULL))
        *next ^= 0xff;
}

/* Without memory for what is kept the bytes are dropped, which is as wrong. */
static void stale(sim_fault *fault, const xd_transfer *t, uint64_t bytes)
{
    unsigned char *now = malloc(bytes);
    if (now)
        gather(now, t, bytes);
    if (fault->last)
        scatter(t, fault->last, bytes < fault->last_bytes ? bytes : fault->last_bytes);
    free(fault->last);
    fault->last = now;
    fault->last_bytes = bytes;
}

/* ---- mirrors ---- */

static void keep_in_mirror(sim *s, sim_fault *fault, const xd_transfer *t)
{
    for (uint64_t row = 0; row < t->height; row++) {
        sim_patch *patch = malloc(sizeof *patch);
        unsigned char *data = malloc(t->width);
        if (!patch || !data) {
            free(patch);
            free(data);
            return;
        }
        memcpy(data, src_at(t, row * t->width), t->width);
        *patch = (sim_patch){.address = t->dst + row * t->dst_pitch, .bytes = t->width, .data = data};
        sim_patch **end = &fault->patches;
        while (*end)
            end = &(*end)->next;
        *end = patch;
    }
    s->mirrors = true;
}

/* Lays what the patch holds of a row over what was copied from it. */
static void lay_over(const sim_patch *patch, const xd_transfer *t, uint64_t row)
{
    uint64_t begin = t->src + row * t->src_pitch, end = begin + t->width;
    uint64_t from = patch->address > begin ? patch->address : begin;
    uint64_t to = patch->address + patch->bytes < end ? patch->address + patch->bytes : end;
    if (from < to)
        memcpy(dst_at(t, row * t->width + (from - begin)), patch->data + (from - patch->address), to - from);
}

static void look_into_mirrors(sim *s, const sim_op *op, const xd_transfer *t)
{
    for (size_t i = 0; i < s->fault_count; i++) {
        const sim_fault *fault = &s->faults[i];
        if (op->stream->device == t->src_device || !fits(fault->is.from, op->stream->device) ||
            !fits(fault->is.to, t->src_device))
            continue;
        for (const sim_patch *patch = fault->patches; patch; patch = patch->next)
            for (uint64_t row = 0; row < t->height; row++)
                lay_over(patch, t, row);
    }
}

/* ---- all of it ---- */

void sim_deliver(sim *s, const sim_op *op)
{
    xd_transfer t = op->u.transfer;
    if (t.height == 1)
        t.dst_pitch = t.src_pitch = t.width;
    sim_fault *fault = op->spoiler;
    uint64_t bytes = op->bytes, value = fault ? fault->is.value : 0;
    switch (fault ? fault->is.kind : -1) {
    case XD_SIM_DROP:
        return;
    case XD_SIM_ZERO:
        zero(&t, bytes);
        return;
    case XD_SIM_MIRROR:
        keep_in_mirror(s, fault, &t);
        return;
    case XD_SIM_STALE:
        stale(fault, &t, bytes);
        return;
    case XD_SIM_SWAP:
        swap(&t, bytes, value);
        return;
    case XD_SIM_FLIP:
        move(&t, 0, 0, bytes);
        if (value < bytes)
            *dst_at(&t, value) ^= 0xff;
        return;
    case XD_SIM_TRUNCATE:
        move(&t, 0, 0, value ? bytes % value : bytes);
        return;
    case XD_SIM_OVERRUN:
        overrun(s, op, &t, bytes);
        return;
    case XD_SIM_ALIAS:
        alias(&t, bytes, value);
        return;
    default:
        move(&t, 0, 0, bytes);
    }
    if (s->mirrors)
        look_into_mirrors(s, op, &t);
}

/* ---- open and clear ---- */

static int check(const sim *s, const xd_sim_fault *fault, size_t index, xd_error *err)
{
    if (!xd_sim_fault_name(fault->kind))
        return xd_fail(err, XD_INVALID, 0, "sim_create", "fault %zu: kind is %d; allowed: 0 to %d", index, fault->kind,
                       XD_SIM_FAULT_KINDS - 1);
    const int devices[] = {fault->from, fault->to};
    for (int i = 0; i < 2; i++)
        if (devices[i] < XD_SIM_ANY || devices[i] >= s->device_count)
            return xd_fail(err, XD_INVALID, 0, "sim_create", "fault %zu: `%s` is %d; allowed: %d (any), %d (host) to %d",
                           index, i ? "to" : "from", devices[i], XD_SIM_ANY, XD_HOST, s->device_count - 1);
    return XD_OK;
}

int sim_faults_open(sim *s, const xd_sim_config *config, xd_error *err)
{
    if (!config->fault_count)
        return XD_OK;
    s->faults = calloc(config->fault_count, sizeof *s->faults);
    if (!s->faults)
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "sim_create", "no host memory for %zu faults", config->fault_count);
    s->fault_count = config->fault_count;
    int status = XD_OK;
    for (size_t i = 0; i < config->fault_count && !status; i++) {
        s->faults[i].is = config->faults[i];
        status = check(s, &config->faults[i], i, err);
    }
    for (int pair = 0; pair < s->device_count * s->device_count && !status; pair++) {
        int from = pair / s->device_count, to = pair % s->device_count;
        s->peer_on[pair] = from != to && sim_fault_hits(s, XD_SIM_ALREADY_ENABLED, from, to);
    }
    return status;
}

void sim_faults_clear(sim *s)
{
    for (size_t i = 0; i < s->fault_count; i++) {
        sim_fault *fault = &s->faults[i];
        free(fault->last);
        while (fault->patches) {
            sim_patch *patch = fault->patches;
            fault->patches = patch->next;
            free(patch->data);
            free(patch);
        }
    }
    free(s->faults);
}
