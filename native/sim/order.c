/*
 * The ordering checker: a race detector over streams, events and the host.
 *
 * Everybody who orders work, the host and each stream, has a clock: for everybody the number of their last access known to
 * come before. Submitting a call passes the host's clock to the stream; an event carries the clock of the stream that
 * recorded it to the streams that wait for it and to the host once it has seen it done. All of that is known when calls are
 * made, so what is found depends on the program alone, not on times.
 *
 * Each block of memory is cut into pieces that were last written and since then read by the same operations. A new access
 * must come after the last write; a write also after the reads.
 */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- clocks ---- */

/* Room for so many; false: no memory, and from now on the checker is blind, which it says once. */
static bool grow(sim *s, sim_clock *clock, uint32_t count)
{
    if (clock->count >= count)
        return true;
    uint64_t *at = realloc(clock->at, count * sizeof *at);
    if (!at) {
        s->order.blind = true;
        return false;
    }
    memset(at + clock->count, 0, (count - clock->count) * sizeof *at);
    clock->at = at;
    clock->count = count;
    return true;
}

static uint64_t known(const sim_clock *clock, uint32_t who)
{
    return who < clock->count ? clock->at[who] : 0;
}

static void join(sim *s, sim_clock *clock, const sim_clock *other)
{
    if (!grow(s, clock, other->count))
        return;
    for (uint32_t i = 0; i < other->count; i++)
        if (clock->at[i] < other->at[i])
            clock->at[i] = other->at[i];
}

static uint64_t tick(sim *s, sim_clock *clock, uint32_t who)
{
    return grow(s, clock, who + 1) ? ++clock->at[who] : 0;
}

/* ---- who made an access ---- */

static void let_go(sim_note *note)
{
    if (note && --note->refs == 0)
        free(note);
}

static sim_note *hold(sim_note *note)
{
    if (note)
        note->refs++;
    return note;
}

static bool is_before(const sim_note *note, const sim_clock *clock)
{
    return !note || note->when <= known(clock, note->who);
}

/* ---- pieces of a block ---- */

static void clear_readers(sim_piece *piece)
{
    for (uint32_t i = 0; i < piece->reader_count; i++)
        let_go(piece->readers[i]);
    piece->reader_count = 0;
}

static void clear_piece(sim_piece *piece)
{
    clear_readers(piece);
    free(piece->readers);
    let_go(piece->writer);
}

static bool same(const sim_piece *a, const sim_piece *b)
{
    return a->writer == b->writer && a->reader_count == b->reader_count &&
           (!a->reader_count || !memcmp(a->readers, b->readers, a->reader_count * sizeof *a->readers));
}

static bool copy_piece(sim_piece *to, const sim_piece *from)
{
    *to = (sim_piece){.end = from->end};
    if (from->reader_count) {
        to->readers = malloc(from->reader_count * sizeof *to->readers);
        if (!to->readers)
            return false;
        to->reader_count = to->reader_capacity = from->reader_count;
        for (uint32_t i = 0; i < from->reader_count; i++)
            to->readers[i] = hold(from->readers[i]);
    }
    to->writer = hold(from->writer);
    return true;
}

static void remove_pieces(sim_pieces *pieces, size_t first, size_t count)
{
    if (!count)
        return;
    for (size_t i = first; i < first + count; i++)
        clear_piece(&pieces->at[i]);
    memmove(&pieces->at[first], &pieces->at[first + count], (pieces->count - first - count) * sizeof *pieces->at);
    pieces->count -= count;
}

/* The index of the piece that begins at the offset, which is cut in two if need be; SIZE_MAX: no memory. */
static size_t cut(sim *s, sim_pieces *pieces, uint64_t offset)
{
    size_t low = 0, high = pieces->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pieces->at[middle].end <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == pieces->count || (low ? pieces->at[low - 1].end : 0) == offset)
        return low;
    if (pieces->count == pieces->capacity) {
        size_t capacity = pieces->capacity ? 2 * pieces->capacity : 8;
        sim_piece *at = realloc(pieces->at, capacity * sizeof *at);
        if (!at)
            goto blind;
        pieces->at = at;
        pieces->capacity = capacity;
    }
    sim_piece left;
    if (!copy_piece(&left, &pieces->at[low]))
        goto blind;
    left.end = offset;
    memmove(&pieces->at[low + 1], &pieces->at[low], (pieces->count - low) * sizeof *pieces->at);
    pieces->at[low] = left;
    pieces->count++;
    return low + 1;
blind:
    s->order.blind = true;
    return SIZE_MAX;
}

static void merge(sim_pieces *pieces, size_t first, size_t last)
{
    for (size_t i = last; i > first; i--)
        if (same(&pieces->at[i - 1], &pieces->at[i])) {
            pieces->at[i - 1].end = pieces->at[i].end;
            remove_pieces(pieces, i, 1);
        }
}

static bool add_reader(sim_piece *piece, sim_note *note, const sim_clock *clock)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < piece->reader_count; i++) {
        if (is_before(piece->readers[i], clock)) /* whoever comes after the new read comes after that one too */
            let_go(piece->readers[i]);
        else
            piece->readers[kept++] = piece->readers[i];
    }
    piece->reader_count = kept;
    if (kept == piece->reader_capacity) {
        uint32_t capacity = kept ? 2 * kept : 2;
        sim_note **readers = realloc(piece->readers, capacity * sizeof *readers);
        if (!readers)
            return false;
        piece->readers = readers;
        piece->reader_capacity = capacity;
    }
    piece->readers[piece->reader_count++] = hold(note);
    return true;
}

void sim_pieces_clear(sim_pieces *pieces)
{
    remove_pieces(pieces, 0, pieces->count);
    free(pieces->at);
    *pieces = (sim_pieces){0};
}

/* ---- violations ---- */

static void describe(const sim_note *note, char *out, size_t size)
{
    if (note->who == SIM_HOST)
        snprintf(out, size, "the host (%s)", note->label);
    else
        snprintf(out, size, "%s (operation %" PRIu64 ", stream %" PRIu32 " of device %d)", note->label, note->seq,
                 note->stream, note->device);
}

static void describe_edge(const sim_note *old, const sim_note *new, char *out, size_t size)
{
    if (old->who == SIM_HOST)
        snprintf(out, size, "the host must do it before it submits the other");
    else if (new->who == SIM_HOST)
        snprintf(out, size, "the host must see an event done that is recorded on stream %" PRIu32 " after operation %" PRIu64,
                 old->stream, old->seq);
    else
        snprintf(out, size,
                 "stream %" PRIu32 " must wait for an event recorded on stream %" PRIu32 " after operation %" PRIu64,
                 new->stream, old->stream, old->seq);
}

/* One report for each pair of operations is enough, whatever the number of pieces. */
static bool is_reported(const sim *s, const sim_note *old, const sim_note *new)
{
    for (size_t i = 0; i < s->order.count; i++)
        if (s->order.pairs[i].old == old->when && s->order.pairs[i].old_who == old->who &&
            s->order.pairs[i].new == new->when && s->order.pairs[i].new_who == new->who)
            return true;
    return false;
}

static void report(sim *s, const sim_block *block, uint64_t begin, uint64_t end, const sim_note *old, bool old_writes,
                   const sim_note *new, bool new_writes)
{
    sim_order *order = &s->order;
    if (order->away || is_reported(s, old, new))
        return;
    order->found++;
    if (order->count == SIM_VIOLATIONS)
        return;
    order->pairs[order->count].old = old->when;
    order->pairs[order->count].old_who = old->who;
    order->pairs[order->count].new = new->when;
    order->pairs[order->count].new_who = new->who;
    char first[112], second[112], edge[128], place[32];
    describe(old, first, sizeof first);
    describe(new, second, sizeof second);
    describe_edge(old, new, edge, sizeof edge);
    if (block->device == XD_HOST)
        snprintf(place, sizeof place, "page-locked memory");
    else
        snprintf(place, sizeof place, "device %d", block->device);
    xd_fail(&order->violations[order->count++], XD_ORDER, 0, "order",
            "%s %s bytes %" PRIu64 " to %" PRIu64 " of allocation %" PRIu64 " on %s, which %s %s, in no order: %s", second,
            new_writes ? "writes" : "reads", begin, end, block->id, place, first, old_writes ? "writes" : "reads", edge);
}

static void check(sim *s, const sim_block *block, const sim_piece *piece, uint64_t begin, const sim_note *note,
                  const sim_clock *clock, bool write)
{
    if (!is_before(piece->writer, clock))
        report(s, block, begin, piece->end, piece->writer, true, note, write);
    for (uint32_t i = 0; write && i < piece->reader_count; i++)
        if (!is_before(piece->readers[i], clock))
            report(s, block, begin, piece->end, piece->readers[i], false, note, write);
}

/* One row. */
static void touch(sim *s, uint64_t address, uint64_t bytes, sim_note *note, const sim_clock *clock, bool write)
{
    sim_block *block = sim_block_at(&s->memory, address);
    if (!block || s->order.blind)
        return;
    sim_pieces *pieces = &block->pieces;
    if (!pieces->count) {
        pieces->at = calloc(8, sizeof *pieces->at);
        if (!pieces->at) {
            s->order.blind = true;
            return;
        }
        pieces->capacity = 8;
        pieces->count = 1;
        pieces->at[0].end = block->bytes;
    }
    uint64_t begin = address - block->address;
    size_t first = cut(s, pieces, begin), last = first == SIZE_MAX ? SIZE_MAX : cut(s, pieces, begin + bytes);
    if (last == SIZE_MAX)
        return;
    for (size_t i = first; i < last; i++) {
        sim_piece *piece = &pieces->at[i];
        check(s, block, piece, i ? pieces->at[i - 1].end : 0, note, clock, write);
        if (write) {
            clear_readers(piece);
            let_go(piece->writer);
            piece->writer = hold(note);
        } else if (!add_reader(piece, note, clock)) {
            s->order.blind = true;
        }
    }
    merge(pieces, first ? first - 1 : 0, last < pieces->count ? last : pieces->count - 1);
}

/* ---- what happens ---- */

static sim_note *new_note(sim *s, uint32_t who, sim_clock *clock, const char *label)
{
    sim_note *note = calloc(1, sizeof *note);
    if (!note) {
        s->order.blind = true;
        return NULL;
    }
    note->refs = 1;
    note->who = who;
    note->when = tick(s, clock, who);
    snprintf(note->label, sizeof note->label, "%s", label);
    return note;
}

void sim_order_stream(sim *s, sim_stream *stream)
{
    stream->who = ++s->order.members;
}

static void touch_rows(sim *s, const xd_transfer *t, uint64_t address, uint64_t pitch, sim_note *note,
                       const sim_clock *clock, bool write)
{
    if (t->height == 1 || pitch == t->width) {
        touch(s, address, t->width * t->height, note, clock, write);
        return;
    }
    for (uint64_t row = 0; row < t->height; row++)
        touch(s, address + row * pitch, t->width, note, clock, write);
}

void sim_order_submit(sim *s, const sim_op *op, const xd_range *ranges, size_t range_count)
{
    if (!s->config.check)
        return;
    sim_stream *stream = op->stream;
    join(s, &stream->clock, &s->order.host);
    sim_note *note = new_note(s, stream->who, &stream->clock, op->label);
    if (!note)
        return;
    note->seq = op->seq;
    note->stream = stream->id;
    note->device = stream->device;
    if (op->kind == SIM_COPY) {
        const xd_transfer *t = &op->u.transfer;
        touch_rows(s, t, t->src, t->src_pitch, note, &stream->clock, false);
        touch_rows(s, t, t->dst, t->dst_pitch, note, &stream->clock, true);
    } else if (op->kind == SIM_FILL) {
        touch(s, op->u.fill.address, op->bytes, note, &stream->clock, true);
    }
    for (size_t i = 0; i < range_count; i++)
        if (ranges[i].bytes)
            touch(s, ranges[i].address, ranges[i].bytes, note, &stream->clock, ranges[i].write != 0);
    let_go(note);
}

void sim_order_record(sim *s, sim_stream *stream, sim_stamp *stamp)
{
    if (!s->config.check)
        return;
    join(s, &stream->clock, &s->order.host);
    join(s, &stamp->clock, &stream->clock);
}

void sim_order_wait(sim *s, sim_stream *stream, const sim_stamp *stamp)
{
    if (s->config.check)
        join(s, &stream->clock, &stamp->clock);
}

void sim_order_seen(sim *s, const sim_clock *clock)
{
    if (s->config.check && !sim_in_callback(s))
        join(s, &s->order.host, clock);
}

void sim_order_host(sim *s, uint64_t address, uint64_t bytes, bool write, const char *label)
{
    if (!s->config.check || sim_in_callback(s))
        return;
    sim_note *note = new_note(s, SIM_HOST, &s->order.host, label);
    if (!note)
        return;
    touch(s, address, bytes, note, &s->order.host, write);
    let_go(note);
}

void sim_order_drained(sim *s, int device)
{
    for (const sim_stream *stream = s->streams; stream; stream = stream->next)
        if (device == XD_HOST || stream->device == device)
            sim_order_seen(s, &stream->clock);
}

int sim_order_raise(sim *s, xd_error *err)
{
    sim_order *order = &s->order;
    if (!err || !s->config.check)
        return XD_OK;
    if (order->blind && !order->said_blind) {
        order->said_blind = true;
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "order", "the ordering checker ran out of memory and sees nothing more");
    }
    return order->raised < order->count ? sim_pass_on(err, &order->violations[order->raised++]) : XD_OK;
}

void xd_sim_watch(xd_driver *driver, int on)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    s->order.away = !on;
    pthread_mutex_unlock(&s->lock);
}

size_t xd_sim_violations(xd_driver *driver, xd_error *out, size_t room)
{
    sim *s = sim_of(driver);
    pthread_mutex_lock(&s->lock);
    size_t found = s->order.found, kept = s->order.count;
    for (size_t i = 0; i < kept && i < room; i++)
        out[i] = s->order.violations[i];
    pthread_mutex_unlock(&s->lock);
    return found;
}
