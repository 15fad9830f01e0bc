/*
 * Random pipelines under the ordering checker: devices, stages, depths, tiles, sizes, paths, chained microbatches, host
 * inputs, calls that fail half way. The checker says nothing and every byte is right; with any one wait left out it speaks.
 *
 *     test_sim_random [pipelines [first seed]]
 */
#include "check.h"
#include "machine.h"

enum { DEVICES = 5, STAGES = 7, DEPTH = 4, BATCHES = 9, MOST = 20000 };
enum { ALL, SOURCE_READY, DEST_FREE, RELEASED, INPUT_FREE, OUTPUT_SEEN, WAITS };

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { PIPELINES = 300 };
#else
enum { PIPELINES = 10000 };
#endif

static xd_error err;
static xd_error *tell; /* NULL: violations are counted, not raised, so that they do not end the run */

static uint64_t state;

static uint32_t below(uint32_t limit)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((state >> 33) % limit);
}

static unsigned pick(unsigned low, unsigned high)
{
    return low + below(high - low + 1);
}

typedef struct stage {
    int device;
    xd_stream *stream;
    xd_buffer *in[DEPTH], *out[DEPTH];
    xd_event *arrived[DEPTH], *used[DEPTH], *done[DEPTH], *released[DEPTH];
    xd_link *link; /* to the next stage; the last one's goes back to the first */
} stage;

typedef struct pipeline {
    xd_driver *driver;
    xd_runtime *runtime;
    unsigned stages, depth, batches, window, slots; /* slots: of inputs */
    uint64_t bytes;
    int without;
    stage stage[STAGES];
    xd_throttle *throttle;
    xd_buffer *inputs[BATCHES], *outputs[BATCHES];
    xd_event *uploaded[BATCHES], *downloaded[BATCHES];
    unsigned wrong;
} pipeline;

typedef struct work { pipeline *p; const unsigned char *in; unsigned char *out; unsigned char expected; } work;

static int compute(void *arg)
{
    work *w = arg;
    for (uint64_t i = 0; i < w->p->bytes; i++) {
        w->p->wrong += w->in[i] != w->expected;
        w->out[i] = (unsigned char)(w->in[i] + 1);
    }
    return 0;
}

static unsigned char *at(const xd_buffer *buffer)
{
    return (unsigned char *)(uintptr_t)xd_buffer_address(buffer);
}

/* ---- building ---- */

static void open_stage(pipeline *p, unsigned k, unsigned devices)
{
    stage *s = &p->stage[k];
    s->device = (int)below(devices);
    OK(xd_stream_open(&s->stream, p->runtime, s->device, &err));
    for (unsigned i = 0; i < p->depth; i++) {
        OK(xd_buffer_open(&s->in[i], p->runtime, s->device, p->bytes, &err));
        OK(xd_buffer_open(&s->out[i], p->runtime, s->device, p->bytes, &err));
        xd_event **const events[] = {&s->arrived[i], &s->used[i], &s->done[i], &s->released[i]};
        for (unsigned j = 0; j < 4; j++)
            OK(xd_event_open(events[j], p->runtime, 0, &err));
    }
}

static void open_link(pipeline *p, unsigned k)
{
    stage *s = &p->stage[k];
    int to = p->stage[(k + 1) % p->stages].device;
    xd_link_options options = {
        .path = (int)below(3),
        .direct_from = pick(1, MOST),
        .max_bytes = below(2) ? p->bytes : 0,
        .tile_bytes = below(4) ? pick(256, MOST) : 0,
        .tiles = pick(1, 5),
        .gate = 1,
    };
    if (!options.max_bytes && !options.tile_bytes)
        options.tile_bytes = 4096; /* a fitted ring for copies of any size would be large */
    OK(xd_link_open(&s->link, p->runtime, s->device, to, &options, &err));
}

static pipeline *open_pipeline(uint64_t seed, int without)
{
    state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int i = 0; i < 8; i++)
        below(2);
    pipeline *p = calloc(1, sizeof *p);
    CHECK(p);
    unsigned devices = pick(1, DEVICES);
    machine *m = machine_make((int)devices);
    m->config.seed = seed;
    m->config.delay = below(3) * 10000;
    m->config.check = 1;
    p->driver = machine_driver(m);
    OK(xd_runtime_open(&p->runtime, p->driver, NULL, &err));
    free(m);
    p->without = without;
    p->stages = pick(2, STAGES);
    p->depth = pick(1, DEPTH);
    p->batches = pick(2, BATCHES);
    p->window = pick(1, p->batches);
    p->slots = pick(1, p->window);
    p->bytes = below(4) ? pick(1, MOST) : pick(1, 64);
    OK(xd_throttle_open(&p->throttle, p->runtime, p->window, &err));
    for (unsigned k = 0; k < p->stages; k++)
        open_stage(p, k, devices);
    for (unsigned k = 0; k < p->stages; k++)
        open_link(p, k);
    for (unsigned i = 0; i < p->batches; i++) {
        OK(xd_buffer_open(&p->outputs[i], p->runtime, XD_HOST, p->bytes, &err));
        OK(xd_event_open(&p->downloaded[i], p->runtime, 0, &err));
        OK(xd_event_open(&p->uploaded[i], p->runtime, 0, &err));
        if (i < p->slots)
            OK(xd_buffer_open(&p->inputs[i], p->runtime, XD_HOST, p->bytes, &err));
    }
    return p;
}

static void close_pipeline(pipeline *p)
{
    for (unsigned k = 0; k < p->stages; k++) {
        stage *s = &p->stage[k];
        xd_link_close(&s->link);
    }
    for (unsigned k = 0; k < p->stages; k++) {
        stage *s = &p->stage[k];
        for (unsigned i = 0; i < p->depth; i++) {
            xd_event_close(&s->arrived[i]);
            xd_event_close(&s->used[i]);
            xd_event_close(&s->done[i]);
            xd_event_close(&s->released[i]);
            xd_buffer_close(&s->in[i]);
            xd_buffer_close(&s->out[i]);
        }
        xd_stream_close(&s->stream);
    }
    for (unsigned i = 0; i < p->batches; i++) {
        xd_buffer_close(&p->outputs[i]);
        xd_event_close(&p->downloaded[i]);
        xd_event_close(&p->uploaded[i]);
        xd_buffer_close(&p->inputs[i]);
    }
    xd_throttle_close(&p->throttle);
    OK(xd_runtime_close(&p->runtime, &err));
    free(p);
}

/* ---- running ---- */

static void wait_unless(pipeline *p, int which, xd_stream *stream, xd_event *event)
{
    if (p->without != which)
        OK(xd_stream_wait(stream, event, tell));
}

/* Fills the input slot and uploads it to the first stage. */
static void feed(pipeline *p, unsigned batch, unsigned slot)
{
    stage *first = &p->stage[0];
    xd_buffer *input = p->inputs[batch % p->slots];
    int done;
    if (p->without != INPUT_FREE && batch >= p->slots)
        OK(xd_event_wait(p->uploaded[batch - p->slots], XD_FOREVER, &done, tell));
    OK(xd_host_access(p->runtime, at(input), p->bytes, 1, tell));
    memset(at(input), (int)(batch * 16 & 255), p->bytes);
    xd_transfer up = {.dst_device = first->device, .src_device = XD_HOST, .dst = xd_buffer_address(first->in[slot]),
                      .src = xd_buffer_address(input), .width = p->bytes, .height = 1};
    OK(xd_stream_copy(first->stream, &up, tell));
    OK(xd_event_record(p->uploaded[batch], first->stream, tell));
}

static void run_stage(pipeline *p, work *w, unsigned k, unsigned slot, unsigned char value)
{
    stage *s = &p->stage[k];
    OK(xd_stream_wait(s->stream, s->arrived[slot], tell));
    wait_unless(p, RELEASED, s->stream, s->released[slot]);
    *w = (work){.p = p, .in = at(s->in[slot]), .out = at(s->out[slot]), .expected = value};
    xd_range ranges[] = {
        {.device = s->device, .address = xd_buffer_address(s->in[slot]), .bytes = p->bytes},
        {.device = s->device, .address = xd_buffer_address(s->out[slot]), .bytes = p->bytes, .write = 1},
    };
    xd_kernel kernel = {.run = compute, .arg = w, .cost = 1000 * pick(1, 50), .label = "stage", .ranges = ranges,
                        .range_count = 2};
    OK(xd_stream_launch(s->stream, &kernel, tell));
    OK(xd_event_record(s->used[slot], s->stream, tell));
    OK(xd_event_record(s->done[slot], s->stream, tell));
}

static void hand_on(pipeline *p, unsigned k, unsigned from, unsigned to)
{
    stage *s = &p->stage[k], *next = &p->stage[(k + 1) % p->stages];
    xd_copy copy = {
        .dst = xd_buffer_address(next->in[to]),
        .src = xd_buffer_address(s->out[from]),
        .width = p->bytes,
        .height = 1,
        .source_ready = p->without == SOURCE_READY ? NULL : s->done[from],
        .dest_free = p->without == DEST_FREE ? NULL : next->used[to],
        .released = s->released[from],
        .arrived = next->arrived[to],
    };
    OK(xd_link_copy(s->link, &copy, tell));
}

static void fetch(pipeline *p, unsigned batch, unsigned slot)
{
    stage *last = &p->stage[p->stages - 1];
    xd_transfer down = {.dst_device = XD_HOST, .src_device = last->device, .dst = xd_buffer_address(p->outputs[batch]),
                        .src = xd_buffer_address(last->out[slot]), .width = p->bytes, .height = 1};
    OK(xd_stream_copy(last->stream, &down, tell));
    OK(xd_event_record(p->downloaded[batch], last->stream, tell));
}

/* A call that is refused in the middle leaves nothing behind that the checker could mind. */
static void fail_something(pipeline *p)
{
    stage *s = &p->stage[below(p->stages)];
    xd_transfer wild = {.dst_device = s->device, .src_device = s->device, .dst = xd_buffer_address(s->in[0]),
                        .src = 64, .width = p->bytes, .height = 1};
    FAILS(xd_stream_copy(s->stream, &wild, &err), XD_INVALID);
    FAILS(xd_stream_fill(s->stream, 64, 1, 1, &err), XD_INVALID);
}

static unsigned run(pipeline *p)
{
    static work works[BATCHES * STAGES];
    unsigned unseen = 0;
    int done;
    unsigned char value[BATCHES];
    for (unsigned batch = 0; batch < p->batches; batch++) {
        unsigned slot = batch % p->depth;
        int chained = batch && below(4) == 0; /* the output of the one before is the input of this one */
        OK(xd_throttle_admit(p->throttle, XD_FOREVER, &done, tell));
        if (chained) {
            value[batch] = (unsigned char)(value[batch - 1] + p->stages);
            hand_on(p, p->stages - 1, (batch - 1) % p->depth, slot);
            OK(xd_event_record(p->uploaded[batch], p->stage[0].stream, tell));
        } else {
            value[batch] = (unsigned char)(batch * 16);
            feed(p, batch, slot);
        }
        for (unsigned k = 0; k < p->stages; k++) {
            if (below(20) == 0)
                fail_something(p);
            run_stage(p, &works[batch * STAGES + k], k, slot, (unsigned char)(value[batch] + k));
            if (k + 1 < p->stages)
                hand_on(p, k, slot, slot);
        }
        fetch(p, batch, slot);
        OK(xd_throttle_retire(p->throttle, p->stage[p->stages - 1].stream, tell));
    }
    for (unsigned batch = 0; batch < p->batches; batch++) {
        if (p->without != OUTPUT_SEEN)
            OK(xd_event_wait(p->downloaded[batch], XD_FOREVER, &done, tell));
        OK(xd_host_access(p->runtime, at(p->outputs[batch]), p->bytes, 0, tell));
        for (uint64_t i = 0; i < p->bytes; i++)
                unseen += at(p->outputs[batch])[i] != (unsigned char)(value[batch] + p->stages);
    }
    return p->wrong + unseen;
}

static size_t violations(uint64_t seed, int without)
{
    pipeline *p = open_pipeline(seed, without);
    xd_error found[64];
    tell = without == ALL ? &err : NULL;
    unsigned wrong = run(p);
    size_t count = xd_sim_violations(p->driver, found, 64);
    if (without == ALL && (count || wrong)) {
        fprintf(stderr, "seed %" PRIu64 ": %u wrong bytes, %zu violations: %s\n", seed, wrong, count,
                count ? found[0].text : "");
        exit(1);
    }
    close_pipeline(p);
    return count;
}

int main(int count, char **arguments)
{
    uint64_t pipelines = count > 1 ? strtoull(arguments[1], NULL, 10) : PIPELINES;
    uint64_t first = count > 2 ? strtoull(arguments[2], NULL, 10) : 0;
    for (uint64_t seed = first; seed < first + pipelines; seed++)
        violations(seed, ALL);
    for (int without = ALL + 1; without < WAITS; without++) {
        size_t found = 0;
        for (uint64_t seed = 0; seed < 20; seed++)
            found += violations(seed, without);
        if (!found)
            fprintf(stderr, "without wait %d nothing was found\n", without);
        CHECK(found > 0);
    }
    return 0;
}
