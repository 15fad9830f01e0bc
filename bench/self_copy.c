/*
 * Ways of queueing a staged copy, called bare: what each driver call costs, what is allowed while another context is
 * current, and how fast and how soon queued copies are for many tile sizes, rings and orders of calls.
 *
 *     self_copy SRC DST SECONDS BYTES sweep     calls, tiles, rings and orders of calls
 *     self_copy SRC DST SECONDS BYTES places    what depends on the CPU of the thread, and on the ring's memory
 *
 * Built and run by self_copy.py; JSON lines on standard output. SRC and DST are device ordinals and may be equal;
 * SECONDS is for the repeats of one figure; BYTES is the largest copy.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_api.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
enum { LANES = 4, RING = 16, REPEATS = 200, QUEUED = 10, CALLS_OF_A_COPY = 6 };

/* Entry points that the library has no use for. */
typedef cu_result (*ctx_create)(cu_context *, unsigned, cu_device);
typedef cu_result (*copy_any)(cu_address, cu_address, size_t, cu_stream);

typedef struct rig {
    cuda_entry_points cu;
    copy_any copy_any; /* cuMemcpyAsync; NULL where the driver has none */
    int src_device, dst_device;
    cu_context from, to, other; /* other: of neither stream; NULL where the driver has no cuCtxCreate */
    cu_stream out, in, lanes[LANES];
    cu_event filled, end, free[RING], joined[LANES];
    cu_event last;   /* of the copy that was queued last: end, or the first lane's */
    int foreign;     /* calls on streams of other contexts than the current one are allowed */
    int same_stream; /* so is an upload to the destination on a stream of the source */
    int used[RING], waited;
    unsigned turn;
    cu_address src, dst;
    int spin; /* the thread that waits for an end does not yield */
    char *ring, *pattern, *seen;
    size_t most;
    double seconds;
} rig;

/* How one copy is queued. */
typedef struct plan {
    const char *name, *place; /* place: the case of its row, "copy" if NULL */
    int push;    /* the context is pushed and popped around every call, as where none is current */
    int settle;  /* pushed once for the copy */
    int ahead;   /* the next tile is waited for at the end of a copy, not at the beginning of the next */
    unsigned group; /* tiles that are freed together */
    unsigned lanes; /* above 0: both legs of a tile in one stream, this many streams in turn */
    size_t bytes, tile;
    size_t shift; /* of the source in the pattern */
    unsigned ring;
} plan;

static void check(cu_result code, const char *call, int line)
{
    if (!code)
        return;
    fprintf(stderr, "self_copy.c:%d: %s: error %d\n", line, call, code);
    exit(1);
}
#define CHECK(r, name, ...) check((r)->cu.name(__VA_ARGS__), #name, __LINE__)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- one copy ---- */

/* One driver call, with the context of its stream pushed and popped around it or not. */
#define CALL(r, p, context, name, ...)                  \
    do {                                                \
        cu_context was_;                                \
        if ((p)->push) {                                \
            CHECK(r, cuCtxGetCurrent, &was_);           \
            CHECK(r, cuCtxPushCurrent, (context));      \
        }                                               \
        CHECK(r, name, __VA_ARGS__);                    \
        if ((p)->push)                                  \
            CHECK(r, cuCtxPopCurrent, &was_);           \
    } while (0)

static void wait_free(rig *r, const plan *p)
{
    unsigned slot = r->turn % p->ring;
    if (slot % p->group == 0 && r->used[slot / p->group] && !r->waited)
        CALL(r, p, r->from, cuStreamWaitEvent, r->out, r->free[slot / p->group], 0);
    r->waited = 0;
}

static void stage(rig *r, const plan *p)
{
    cu_context was;
    if (p->settle)
        CHECK(r, cuCtxPushCurrent, r->from);
    for (size_t at = 0; at < p->bytes; at += p->tile) {
        unsigned slot = r->turn % p->ring;
        size_t bytes = p->tile < p->bytes - at ? p->tile : p->bytes - at;
        char *tile = r->ring + slot * p->tile;
        wait_free(r, p);
        CALL(r, p, r->from, cuMemcpyDtoHAsync, tile, r->src + at, bytes, r->out);
        CALL(r, p, r->from, cuEventRecord, r->filled, r->out);
        CALL(r, p, r->to, cuStreamWaitEvent, r->in, r->filled, 0);
        CALL(r, p, r->to, cuMemcpyHtoDAsync, r->dst + at, tile, bytes, r->in);
        if (at + bytes == p->bytes)
            CALL(r, p, r->to, cuEventRecord, r->last = r->end, r->in);
        if (slot % p->group == p->group - 1) {
            CALL(r, p, r->to, cuEventRecord, r->free[slot / p->group], r->in);
            r->used[slot / p->group] = 1;
        }
        r->turn++;
    }
    if (p->ahead) {
        wait_free(r, p);
        r->waited = 1;
    }
    if (p->settle)
        CHECK(r, cuCtxPopCurrent, &was);
}

/* No events between the legs: stream order does it all. */
static void stage_in_lanes(rig *r, const plan *p)
{
    unsigned lane = 0, used = 0;
    for (size_t at = 0; at < p->bytes; at += p->tile, lane = (lane + 1) % p->lanes) {
        size_t bytes = p->tile < p->bytes - at ? p->tile : p->bytes - at;
        char *tile = r->ring + lane * p->tile;
        CALL(r, p, r->from, cuMemcpyDtoHAsync, tile, r->src + at, bytes, r->lanes[lane]);
        CALL(r, p, r->from, cuMemcpyHtoDAsync, r->dst + at, tile, bytes, r->lanes[lane]);
        used = lane + 1 > used ? lane + 1 : used;
    }
    for (unsigned i = 1; i < used; i++) {
        CALL(r, p, r->from, cuEventRecord, r->joined[i], r->lanes[i]);
        CALL(r, p, r->from, cuStreamWaitEvent, r->lanes[0], r->joined[i], 0);
    }
    CALL(r, p, r->from, cuEventRecord, r->joined[0], r->lanes[0]);
    r->last = r->joined[0];
}

static void copy(rig *r, const plan *p)
{
    if (p->lanes)
        stage_in_lanes(r, p);
    else
        stage(r, p);
}

static void await(rig *r)
{
    cu_result code;
    while ((code = r->cu.cuEventQuery(r->last)) == CU_NOT_READY)
        if (!r->spin)
            sched_yield();
    check(code, "cuEventQuery", __LINE__);
}

static void finish(rig *r)
{
    CHECK(r, cuCtxPushCurrent, r->from);
    CHECK(r, cuCtxSynchronize, );
    CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    CHECK(r, cuCtxPushCurrent, r->to);
    CHECK(r, cuCtxSynchronize, );
    CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
}

static void begin_plan(rig *r)
{
    memset(r->used, 0, sizeof r->used);
    r->turn = 0;
    r->waited = 0;
}

/* ---- what is measured ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[count / 2];
}

/* Is the destination what the source was, after two copies in a row over poison? */
static int is_right(rig *r, const plan *p)
{
    CHECK(r, cuCtxPushCurrent, r->to);
    CHECK(r, cuMemsetD8Async, r->dst, 0xA5, p->bytes, r->in);
    CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    finish(r);
    copy(r, p);
    copy(r, p);
    finish(r);
    size_t looked_at = p->bytes < 64 * MIB ? p->bytes : 64 * MIB, from = p->bytes - looked_at;
    CHECK(r, cuCtxPushCurrent, r->to);
    CHECK(r, cuMemcpyDtoHAsync, r->seen, r->dst + from, looked_at, r->in);
    CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    finish(r);
    /* The pattern is 64 MiB that repeat. */
    size_t shift = (from + p->shift) % (64 * MIB), first = looked_at < 64 * MIB - shift ? looked_at : 64 * MIB - shift;
    return !memcmp(r->seen, r->pattern + shift, first) && !memcmp(r->seen + first, r->pattern, looked_at - first);
}

/* The call alone while the source's stream is busy for milliseconds. */
static double submit_behind(rig *r, const plan *p)
{
    double calls[QUEUED];
    for (int i = 0; i < QUEUED; i++) {
        cu_stream first = p->lanes ? r->lanes[0] : r->out;
        for (int k = 0; k < 3; k++)
            CHECK(r, cuMemcpyDtoHAsync, r->seen, r->src, r->most < 64 * MIB ? r->most : 64 * MIB, first);
        double begin = now();
        copy(r, p);
        calls[i] = now() - begin;
        finish(r);
    }
    return median(calls, QUEUED);
}

static void measure(rig *r, const plan *p, int behind)
{
    double whole[REPEATS], calls[REPEATS];
    int count = 0;
    if (p->shift + p->bytes > r->most)
        return;
    begin_plan(r);
    int right = is_right(r, p);
    if (p->push)
        CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    for (double until = now() + r->seconds; count < REPEATS && (count < 7 || now() < until); count++) {
        double begin = now();
        copy(r, p);
        calls[count] = now() - begin;
        if (p->push)
            CHECK(r, cuCtxPushCurrent, r->from);
        await(r);
        whole[count] = now() - begin;
        if (p->push)
            CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    }
    if (p->push)
        CHECK(r, cuCtxPushCurrent, r->from);
    size_t tiles = (p->bytes + p->tile - 1) / p->tile;
    double best = 1e9, time = median(whole, count), call = median(calls, count);
    for (int i = 0; i < count; i++)
        best = whole[i] < best ? whole[i] : best;
    printf("{\"case\": \"%s\", \"method\": \"%s\", \"bytes\": %zu, \"tile\": %zu, \"ring\": %u, \"tiles\": %zu, "
           "\"us\": %.2f, \"best_us\": %.2f, \"gb_s\": %.3f, \"submit_us\": %.2f, \"right\": %s",
           p->place ? p->place : "copy", p->name, p->bytes, p->tile, p->ring, tiles, time * 1e6, best * 1e6,
           (double)p->bytes / time / 1e9, call * 1e6, right ? "true" : "false");
    if (behind) {
        begin_plan(r);
        printf(", \"behind_us\": %.2f", submit_behind(r, p) * 1e6);
    }
    printf("}\n");
    fflush(stdout);
}

/* ---- driver calls by themselves ---- */

static void say_call(const char *name, double seconds, int times)
{
    printf("{\"case\": \"call\", \"method\": \"%s\", \"ns\": %.0f}\n", name, seconds / times * 1e9);
}

#define TIME(r, name, statement)                                    \
    do {                                                            \
        enum { TIMES_ = 100, ROUNDS_ = 15 };                        \
        double rounds_[ROUNDS_];                                    \
        for (int round_ = 0; round_ < ROUNDS_; round_++) {          \
            finish(r);                                              \
            double begin_ = now();                                  \
            for (int time_ = 0; time_ < TIMES_; time_++)            \
                statement;                                          \
            rounds_[round_] = now() - begin_;                       \
        }                                                           \
        finish(r);                                                  \
        say_call(name, median(rounds_, ROUNDS_), TIMES_);           \
    } while (0)

static void four_calls(rig *r)
{
    CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, 4 * KIB, r->out);
    CHECK(r, cuEventRecord, r->filled, r->out);
    CHECK(r, cuStreamWaitEvent, r->in, r->filled, 0);
    CHECK(r, cuMemcpyHtoDAsync, r->dst, r->ring, 4 * KIB, r->in);
}

static void time_calls(rig *r)
{
    cu_context got;
    TIME(r, "cuCtxGetCurrent", CHECK(r, cuCtxGetCurrent, &got));
    TIME(r, "cuCtxPushCurrent, Pop", (CHECK(r, cuCtxPushCurrent, r->to), CHECK(r, cuCtxPopCurrent, &got)));
    TIME(r, "cuEventRecord", CHECK(r, cuEventRecord, r->filled, r->out));
    TIME(r, "cuEventQuery", (void)r->cu.cuEventQuery(r->filled));
    TIME(r, "cuStreamQuery", (void)r->cu.cuStreamQuery(r->out));
    TIME(r, "cuStreamWaitEvent, over", CHECK(r, cuStreamWaitEvent, r->in, r->filled, 0));
    for (size_t bytes = 4 * KIB; bytes <= 64 * KIB; bytes *= 16) {
        char name[64];
        snprintf(name, sizeof name, "cuMemcpyDtoHAsync %zu KiB", bytes / KIB);
        TIME(r, name, CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, bytes, r->out));
        snprintf(name, sizeof name, "cuMemcpyHtoDAsync %zu KiB", bytes / KIB);
        TIME(r, name, CHECK(r, cuMemcpyHtoDAsync, r->dst, r->ring, bytes, r->in));
    }
    cu_address host = (cu_address)(uintptr_t)r->ring;
    if (r->from == r->to)
        TIME(r, "cuMemsetD8Async 4 KiB", CHECK(r, cuMemsetD8Async, r->dst, 0, 4 * KIB, r->in));
    TIME(r, "cuMemcpyDtoDAsync 4 KiB", CHECK(r, cuMemcpyDtoDAsync, r->dst, r->dst + 4 * KIB, 4 * KIB, r->in));
    if (r->copy_any && !r->copy_any(host, r->src, 4 * KIB, r->out)) {
        TIME(r, "cuMemcpyAsync down 4 KiB", r->copy_any(host, r->src, 4 * KIB, r->out));
        TIME(r, "cuMemcpyAsync up 4 KiB", r->copy_any(r->dst, host, 4 * KIB, r->in));
    }
    if (!r->cu.cuMemcpyDtoDAsync(host, r->src, 4 * KIB, r->out)) /* page-locked memory has one address for all */
        TIME(r, "cuMemcpyDtoDAsync down 4 KiB", (void)r->cu.cuMemcpyDtoDAsync(host, r->src, 4 * KIB, r->out));
    if (r->most >= 2 * MIB)
        TIME(r, "cuMemcpyDtoHAsync 2 MiB", CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, 2 * MIB, r->out));
    TIME(r, "D2H + record", (CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, 4 * KIB, r->out),
                             CHECK(r, cuEventRecord, r->filled, r->out)));
    TIME(r, "D2H + record + wait", (CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, 4 * KIB, r->out),
                                    CHECK(r, cuEventRecord, r->filled, r->out),
                                    CHECK(r, cuStreamWaitEvent, r->in, r->filled, 0)));
    TIME(r, "D2H + record + wait + H2D", four_calls(r));
    TIME(r, "the same + record free", (four_calls(r), CHECK(r, cuEventRecord, r->free[0], r->in)));
    if (r->same_stream)
        TIME(r, "D2H + H2D, one stream", (CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src, 4 * KIB, r->lanes[0]),
                                          CHECK(r, cuMemcpyHtoDAsync, r->dst, r->ring, 4 * KIB, r->lanes[0])));
}

/* Every operation on streams and events of r->from and r->to while another context is current: the answers' codes. */
static void try_foreign(rig *r)
{
    r->foreign = 1;
    struct {
        const char *name;
        cu_context context;
    } const currents[] = {{"source", r->from}, {"destination", r->to}, {"other", r->other}, {"none", NULL}};
    for (size_t i = 0; i < sizeof currents / sizeof currents[0]; i++) {
        cu_context was;
        if (!currents[i].context && i == 2)
            continue;
        CHECK(r, cuCtxPopCurrent, &was);
        if (currents[i].context)
            CHECK(r, cuCtxPushCurrent, currents[i].context);
        struct {
            const char *name;
            cu_result code;
        } const answers[] = {
            {"down", r->cu.cuMemcpyDtoHAsync(r->ring, r->src, 4 * KIB, r->out)},
            {"record out", r->cu.cuEventRecord(r->filled, r->out)},
            {"wait in", r->cu.cuStreamWaitEvent(r->in, r->filled, 0)},
            {"up", r->cu.cuMemcpyHtoDAsync(r->dst, r->ring, 4 * KIB, r->in)},
            {"record in", r->cu.cuEventRecord(r->end, r->in)},
            {"wait out", r->cu.cuStreamWaitEvent(r->out, r->end, 0)},
            {"memset in", r->cu.cuMemsetD8Async(r->dst, 1, 4 * KIB, r->in)},
            {"stream query", r->cu.cuStreamQuery(r->in)},
            {"event query", r->cu.cuEventQuery(r->end)},
            {"up on the source's stream", r->cu.cuMemcpyHtoDAsync(r->dst, r->ring, 4 * KIB, r->lanes[0])},
            {"down on the destination's stream", r->cu.cuMemcpyDtoHAsync(r->ring, r->src, 4 * KIB, r->in)},
        };
        if (currents[i].context)
            CHECK(r, cuCtxPopCurrent, &was);
        CHECK(r, cuCtxPushCurrent, r->from);
        finish(r);
        for (size_t k = 0; k < CALLS_OF_A_COPY && currents[i].context; k++)
            r->foreign = r->foreign && !answers[k].code;
        printf("{\"case\": \"current\", \"method\": \"%s\"", currents[i].name);
        for (size_t k = 0; k < sizeof answers / sizeof answers[0]; k++)
            printf(", \"%s\": %d", answers[k].name, answers[k].code);
        printf("}\n");
    }
}

/* ---- both legs at their limit ---- */

static void legs(rig *r)
{
    size_t bytes = r->most < 256 * MIB ? r->most : 256 * MIB, window = 16 * MIB < bytes ? 16 * MIB : bytes;
    static const char *const names[] = {"down", "up", "both legs"};
    for (int which = 1; which <= 3; which++) {
        double best = 1e9;
        for (int i = 0; i < 5; i++) {
            double begin = now();
            for (size_t at = 0; at < bytes; at += window) {
                if (which & 1)
                    CHECK(r, cuMemcpyDtoHAsync, r->ring, r->src + at, window, r->out);
                CHECK(r, cuCtxPushCurrent, r->to);
                if (which & 2)
                    CHECK(r, cuMemcpyHtoDAsync, r->dst + at, r->ring + window, window, r->in);
                CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
            }
            finish(r);
            best = now() - begin < best ? now() - begin : best;
        }
        printf("{\"case\": \"limit\", \"method\": \"%s\", \"bytes\": %zu, \"gb_s\": %.2f}\n", names[which - 1], bytes,
               (double)bytes / best / 1e9);
    }
}

/* ---- the rig ---- */

static int load(rig *r, void *library, ctx_create *create)
{
    typedef cu_result (*getter)(const char *, void **, int, uint64_t, int *);
    getter get = (getter)dlsym(library, "cuGetProcAddress_v2");
    if (!get)
        return 0;
    void **at = (void **)&r->cu;
    int found;
#define RESOLVE(name, version, optional, parameters)          \
    if (get(#name, at++, version, 0, &found) && !(optional)) \
        return 0;
    CUDA_ENTRY_POINTS(RESOLVE)
#undef RESOLVE
    void *address = NULL;
    if (get("cuCtxCreate", &address, 3020, 0, &found))
        address = NULL;
    *create = (ctx_create)address;
    address = NULL;
    if (get("cuMemcpyAsync", &address, 4000, 0, &found))
        address = NULL;
    r->copy_any = (copy_any)address;
    return 1;
}

static cu_context context_of(rig *r, int device)
{
    cu_device handle;
    cu_context context;
    CHECK(r, cuDeviceGet, &handle, device);
    CHECK(r, cuDevicePrimaryCtxRetain, &context, handle);
    return context;
}

static void open_rig(rig *r, ctx_create create)
{
    cu_device handle;
    CHECK(r, cuDeviceGet, &handle, r->src_device);
    if (create && !create(&r->other, 0, handle))
        CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    r->from = context_of(r, r->src_device);
    r->to = context_of(r, r->dst_device);
    CHECK(r, cuCtxPushCurrent, r->to);
    CHECK(r, cuStreamCreateWithPriority, &r->in, CU_NON_BLOCKING, 0);
    CHECK(r, cuEventCreate, &r->end, CU_WITHOUT_TIMING);
    for (int i = 0; i < RING; i++)
        CHECK(r, cuEventCreate, &r->free[i], CU_WITHOUT_TIMING);
    CHECK(r, cuMemAlloc, &r->dst, r->most);
    CHECK(r, cuCtxPopCurrent, &(cu_context){NULL});
    CHECK(r, cuCtxPushCurrent, r->from);
    CHECK(r, cuStreamCreateWithPriority, &r->out, CU_NON_BLOCKING, 0);
    CHECK(r, cuEventCreate, &r->filled, CU_WITHOUT_TIMING);
    for (int i = 0; i < LANES; i++) {
        CHECK(r, cuStreamCreateWithPriority, &r->lanes[i], CU_NON_BLOCKING, 0);
        CHECK(r, cuEventCreate, &r->joined[i], CU_WITHOUT_TIMING);
    }
    CHECK(r, cuMemAlloc, &r->src, r->most);
    CHECK(r, cuMemHostAlloc, (void **)&r->ring, 128 * MIB, CU_PORTABLE);
    CHECK(r, cuMemHostAlloc, (void **)&r->pattern, 64 * MIB, CU_PORTABLE);
    CHECK(r, cuMemHostAlloc, (void **)&r->seen, 64 * MIB, CU_PORTABLE);
    uint64_t *words = (uint64_t *)(void *)r->pattern;
    for (size_t i = 0; i < 64 * MIB / sizeof *words; i++)
        words[i] = (i + 1) * 0x9E3779B97F4A7C15;
    for (size_t at = 0; at < r->most; at += 64 * MIB)
        CHECK(r, cuMemcpyHtoDAsync, r->src + at, r->pattern, r->most - at < 64 * MIB ? r->most - at : 64 * MIB, r->out);
    finish(r);
}

/* The tile of n equal ones, a multiple of 4 KiB. */
static size_t tile_of(size_t bytes, size_t tiles)
{
    size_t tile = (bytes + tiles - 1) / tiles;
    return (tile + 4 * KIB - 1) / (4 * KIB) * (4 * KIB);
}

static void sweep(rig *r)
{
    static const struct {
        size_t bytes;
        int tiles[10];
    } sizes[] = {
        {4 * KIB, {1}},
        {16 * KIB, {1}},
        {64 * KIB, {1, 2}},
        {256 * KIB, {1, 2, 3}},
        {1 * MIB, {1, 2, 3, 4}},
        {4 * MIB, {2, 3, 4, 5, 6, 8}},
        {12 * MIB, {3, 4, 5, 6, 7, 8, 10, 12}},
        {64 * MIB, {8, 10, 12, 14, 16, 20, 24, 32}},
        {256 * MIB, {26, 32, 43, 52, 64}},
        {GIB, {64, 86, 128, 192}},
    };
    static const plan plans[] = {
        {.name = "pushed", .push = 1, .group = 1, .ring = 4},
        {.name = "settled", .settle = 1, .group = 1, .ring = 4},
        {.name = "ahead", .settle = 1, .ahead = 1, .group = 1, .ring = 4},
        {.name = "pairs", .settle = 1, .ahead = 1, .group = 2, .ring = 4},
        {.name = "pairs of 6", .settle = 1, .ahead = 1, .group = 2, .ring = 6},
        {.name = "threes of 6", .settle = 1, .ahead = 1, .group = 3, .ring = 6},
        {.name = "pairs of 8", .settle = 1, .ahead = 1, .group = 2, .ring = 8},
        {.name = "fours of 8", .settle = 1, .ahead = 1, .group = 4, .ring = 8},
        {.name = "ring of 2", .settle = 1, .ahead = 1, .group = 1, .ring = 2},
        {.name = "ring of 3", .settle = 1, .ahead = 1, .group = 1, .ring = 3},
        {.name = "one stream", .lanes = 1, .ring = 1},
        {.name = "2 lanes", .lanes = 2, .ring = 2},
        {.name = "3 lanes", .lanes = 3, .ring = 3},
        {.name = "4 lanes", .lanes = 4, .ring = 4},
    };
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0] && sizes[s].bytes <= r->most; s++)
        for (size_t t = 0; t < 10 && sizes[s].tiles[t]; t++)
            for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
                plan p = plans[i];
                p.bytes = sizes[s].bytes;
                p.tile = tile_of(p.bytes, (size_t)sizes[s].tiles[t]);
                if (p.ring * p.tile > 128 * MIB || (p.lanes && !r->same_stream) ||
                    (p.lanes == 1 && sizes[s].tiles[t] > 2) ||
                    (p.settle && !r->foreign))
                    continue;
                measure(r, &p, p.bytes >= MIB && p.bytes <= 64 * MIB);
            }
}

/* ---- places ---- */

/* The same copy by a thread on each CPU in turn. */
static void on_every_cpu(rig *r)
{
    static char names[CPU_SETSIZE][24];
    cpu_set_t all;
    if (pthread_getaffinity_np(pthread_self(), sizeof all, &all))
        return;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        if (pthread_setaffinity_np(pthread_self(), sizeof one, &one))
            continue;
        snprintf(names[cpu], sizeof names[cpu], "cpu %zu", cpu);
        plan p = {.name = "pairs", .place = names[cpu], .settle = 1, .ahead = 1, .group = 2, .ring = 4};
        p.bytes = 12 * MIB;
        p.tile = 2 * MIB;
        measure(r, &p, 1);
        p.bytes = p.tile = 4 * KIB;
        measure(r, &p, 0);
    }
    pthread_setaffinity_np(pthread_self(), sizeof all, &all);
}

static void with_ways_to_wait(rig *r)
{
    for (int round = 0; round < 3; round++)
        for (r->spin = 0; r->spin < 2; r->spin++) {
            plan p = {.name = "pairs", .settle = 1, .ahead = 1, .group = 2, .ring = 4};
            p.place = r->spin ? "wait: spin" : "wait: yield";
            p.bytes = 12 * MIB;
            p.tile = 2 * MIB;
            measure(r, &p, 1);
            p.bytes = p.tile = 4 * KIB;
            measure(r, &p, 0);
        }
    r->spin = 0;
}

/* Rings allocated just as large as they are used, of whole 2 MiB, and in a large block; sources and targets that begin
   on a page of 2 MiB and 4 KiB later. Three allocations of each. */
static void with_rings(rig *r)
{
    static const size_t tiles[] = {4096 * KIB, 4684 * KIB, 3512 * KIB};
    static const char *const places[] = {"ring: exact", "ring: 2 MiB", "ring: block", "ring: exact, +4 KiB"};
    char *block = r->ring;
    cu_address src = r->src, dst = r->dst;
    for (size_t t = 0; t < sizeof tiles / sizeof tiles[0]; t++)
        for (int place = 0; place < 4; place++)
            for (int again = 0; again < 3; again++) {
                size_t bytes = 4 * tiles[t];
                plan p = {.name = "pairs", .place = places[place], .settle = 1, .ahead = 1, .group = 2, .ring = 4};
                p.bytes = 64 * MIB - (place == 3 ? 4 * KIB : 0);
                p.tile = tiles[t];
                if (place == 1)
                    bytes = (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
                if (place != 2)
                    CHECK(r, cuMemHostAlloc, (void **)&r->ring, bytes, CU_PORTABLE);
                r->src = src + (place == 3 ? 4 * KIB : 0);
                r->dst = dst + (place == 3 ? 4 * KIB : 0);
                p.shift = place == 3 ? 4 * KIB : 0;
                measure(r, &p, 0);
                if (place != 2)
                    CHECK(r, cuMemFreeHost, r->ring);
                r->ring = block;
            }
    r->src = src;
    r->dst = dst;
}

int main(int argc, char **argv)
{
    rig r = {0};
    ctx_create create;
    if (argc != 6)
        return 2;
    r.src_device = atoi(argv[1]);
    r.dst_device = atoi(argv[2]);
    r.seconds = atof(argv[3]);
    r.most = (size_t)atoll(argv[4]);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library || !load(&r, library, &create)) {
        fprintf(stderr, "no usable libcuda.so.1\n");
        return 1;
    }
    CHECK(&r, cuInit, 0);
    open_rig(&r, create);
    legs(&r);
    if (!strcmp(argv[5], "places")) {
        r.foreign = 1;
        time_calls(&r);
        with_ways_to_wait(&r);
        on_every_cpu(&r);
        with_rings(&r);
        return 0;
    }
    try_foreign(&r);
    /* Peer access was never enabled. */
    plan lane = {.name = "one stream", .lanes = 1, .ring = 1, .bytes = 64 * KIB, .tile = 64 * KIB};
    if (!r.cu.cuMemcpyHtoDAsync(r.dst, r.ring, 4 * KIB, r.lanes[0]))
        r.same_stream = is_right(&r, &lane);
    printf("{\"case\": \"one stream\", \"method\": \"%s\"}\n", r.same_stream ? "works" : "does not work");
    time_calls(&r);
    sweep(&r);
    return 0;
}
