#include "recorder.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { STREAM, EVENT, MEMORY };

typedef struct recorder_block {
    struct recorder_block *next;
    int kind, device;
    char name[24];
    unsigned char *bytes;
    uint64_t size;
} block;

static void say(recorder *rec, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(recorder *rec, const char *format, ...)
{
    size_t used = strlen(rec->log), room = sizeof rec->log - used;
    va_list arguments;
    va_start(arguments, format);
    int wrote = vsnprintf(rec->log + used, room, format, arguments);
    va_end(arguments);
    CHECK(wrote >= 0 && (size_t)wrote + 2 < room);
    strcat(rec->log, "\n");
}

static block *make(recorder *rec, int kind, int device, uint64_t size)
{
    static const char *const letters[] = {"s", "e", "m"};
    const char *const *const known[] = {rec->names.streams, rec->names.events, rec->names.memory};
    const char *const *names = known[kind];
    int index = rec->made[kind]++, named = 0;
    while (names && named <= index && names[named])
        named++;
    block *made = malloc(sizeof *made);
    CHECK(made);
    *made = (block){0};
    if (named > index)
        snprintf(made->name, sizeof made->name, "%s", names[index]);
    else
        snprintf(made->name, sizeof made->name, "%s%d", letters[kind], index);
    made->kind = kind;
    made->device = device;
    made->size = size;
    made->bytes = NULL;
    if (size) /* whole pages, as the vendors' memory is */
        CHECK_EQ(posix_memalign((void **)&made->bytes, 4096, size), 0);
    made->next = rec->blocks;
    rec->blocks = made;
    rec->live++;
    return made;
}

static block *find(recorder *rec, int kind, const void *handle)
{
    for (block *b = rec->blocks; b; b = b->next)
        if (b == handle && b->kind == kind)
            return b;
    return NULL;
}

static block *find_memory(recorder *rec, int device, uint64_t address, uint64_t bytes)
{
    for (block *b = rec->blocks; b; b = b->next) {
        uint64_t base = (uint64_t)(uintptr_t)b->bytes;
        if (b->kind == MEMORY && b->device == device && address >= base && address + bytes <= base + b->size)
            return b;
    }
    return NULL;
}

static int destroy(recorder *rec, block *gone, xd_error *err)
{
    if (!gone)
        return xd_fail(err, XD_INVALID, 0, "destroy", "an unknown handle");
    block **at = &rec->blocks;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    free(gone->bytes);
    free(gone);
    rec->live--;
    return XD_OK;
}

#define ENTER                              \
    recorder *rec = (recorder *)driver;    \
    pthread_mutex_lock(&rec->lock);        \
    int status = XD_OK

#define LEAVE                              \
    pthread_mutex_unlock(&rec->lock);      \
    return status

static void rec_close(xd_driver *driver)
{
    ((recorder *)driver)->closed = 1;
}

static int rec_device_count(xd_driver *driver, int *count, xd_error *err)
{
    ENTER;
    *count = rec->devices;
    if (!rec->devices)
        status = xd_fail(err, XD_NO_DEVICE, 0, "device_count", "none");
    LEAVE;
}

static int rec_device_info(xd_driver *driver, int device, xd_device_info *out, xd_error *err)
{
    (void)driver, (void)err;
    *out = (xd_device_info){.name = "recorder", .arch = "rec", .memory = (uint64_t)device};
    return XD_OK;
}

static int rec_memory_info(xd_driver *driver, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err)
{
    (void)err;
    ENTER;
    *free_bytes = *total_bytes = UINT64_C(1) << 40;
    for (block *b = rec->blocks; b; b = b->next)
        *free_bytes -= b->device == device ? b->size : 0;
    LEAVE;
}

static int rec_peer_capable(xd_driver *driver, int device, int peer, int *capable, xd_error *err)
{
    (void)device, (void)peer, (void)err;
    *capable = ((recorder *)driver)->peer_capable;
    return XD_OK;
}

static int rec_peer_enable(xd_driver *driver, int device, int peer, int *enabled, xd_error *err)
{
    (void)err;
    ENTER;
    say(rec, "peer_enable %d %d", device, peer);
    *enabled = rec->peer_enabled;
    LEAVE;
}

static int rec_device_alloc(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err)
{
    (void)err;
    ENTER;
    *address = (uint64_t)(uintptr_t)make(rec, MEMORY, device, bytes)->bytes;
    LEAVE;
}

static int rec_host_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err)
{
    (void)err;
    ENTER;
    *address = make(rec, MEMORY, XD_HOST, bytes)->bytes;
    LEAVE;
}

static int rec_device_free(xd_driver *driver, int device, uint64_t address, xd_error *err)
{
    ENTER;
    status = destroy(rec, find_memory(rec, device, address, 1), err);
    LEAVE;
}

static int rec_host_free(xd_driver *driver, void *address, xd_error *err)
{
    return rec_device_free(driver, XD_HOST, (uint64_t)(uintptr_t)address, err);
}

static int rec_stream_create(xd_driver *driver, int device, void **stream, xd_error *err)
{
    (void)err;
    ENTER;
    *stream = make(rec, STREAM, device, 0);
    LEAVE;
}

static int rec_stream_destroy(xd_driver *driver, int device, void *stream, xd_error *err)
{
    (void)device;
    ENTER;
    status = destroy(rec, find(rec, STREAM, stream), err);
    LEAVE;
}

static int rec_stream_query(xd_driver *driver, int device, void *stream, int *idle, xd_error *err)
{
    (void)device, (void)err;
    ENTER;
    CHECK(find(rec, STREAM, stream));
    *idle = 1;
    LEAVE;
}

static int rec_stream_wait(xd_driver *driver, int device, void *stream, void *event, xd_error *err)
{
    (void)err;
    ENTER;
    block *s = find(rec, STREAM, stream), *e = find(rec, EVENT, event);
    CHECK(s && e && s->device == device);
    say(rec, "%s wait %s", s->name, e->name);
    LEAVE;
}

static int rec_event_create(xd_driver *driver, int device, int timing, void **event, xd_error *err)
{
    (void)err, (void)timing;
    ENTER;
    *event = make(rec, EVENT, device, 0);
    LEAVE;
}

static int rec_event_destroy(xd_driver *driver, int device, void *event, xd_error *err)
{
    ENTER;
    block *e = find(rec, EVENT, event);
    CHECK(e && e->device == device);
    status = destroy(rec, e, err);
    LEAVE;
}

static int rec_event_record(xd_driver *driver, int device, void *event, void *stream, xd_error *err)
{
    (void)err;
    ENTER;
    block *s = find(rec, STREAM, stream), *e = find(rec, EVENT, event);
    CHECK(s && e && s->device == device && e->device == device);
    say(rec, "%s record %s", s->name, e->name);
    LEAVE;
}

static int rec_event_query(xd_driver *driver, int device, void *event, int *done, xd_error *err)
{
    ENTER;
    block *e = find(rec, EVENT, event);
    CHECK(e && e->device == device);
    rec->queries++;
    if (rec->query_status)
        status = xd_fail(err, rec->query_status, 0, "event_query", "as told");
    else
        *done = rec->pending ? (rec->pending--, 0) : 1;
    LEAVE;
}

static int rec_event_elapsed(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err)
{
    (void)driver, (void)device, (void)begin, (void)end, (void)err;
    *seconds = 0.25;
    return XD_OK;
}

static void place(char *text, size_t room, const block *memory, uint64_t address)
{
    snprintf(text, room, "%s+%" PRIu64, memory->name, address - (uint64_t)(uintptr_t)memory->bytes);
}

static int rec_copy(xd_driver *driver, int device, void *stream, const xd_transfer *t, xd_error *err)
{
    (void)err;
    ENTER;
    block *s = find(rec, STREAM, stream);
    uint64_t gap = t->height - 1;
    block *dst = find_memory(rec, t->dst_device, t->dst, gap * (gap ? t->dst_pitch : 0) + t->width);
    block *src = find_memory(rec, t->src_device, t->src, gap * (gap ? t->src_pitch : 0) + t->width);
    CHECK(s && dst && src && s->device == device && t->width && t->height);
    char to[48], from[48];
    place(to, sizeof to, dst, t->dst);
    place(from, sizeof from, src, t->src);
    if (t->height == 1)
        say(rec, "%s copy %s > %s, %" PRIu64, s->name, from, to, t->width);
    else
        say(rec, "%s copy %s/%" PRIu64 " > %s/%" PRIu64 ", %" PRIu64 " x %" PRIu64, s->name, from, t->src_pitch, to,
            t->dst_pitch, t->height, t->width);
    for (uint64_t row = 0; row < t->height; row++)
        memmove(dst->bytes + (t->dst - (uint64_t)(uintptr_t)dst->bytes) + row * t->dst_pitch,
                src->bytes + (t->src - (uint64_t)(uintptr_t)src->bytes) + row * t->src_pitch, t->width);
    LEAVE;
}

static int rec_fill(xd_driver *driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes,
                    xd_error *err)
{
    (void)err;
    ENTER;
    block *memory = find_memory(rec, device, address, bytes);
    CHECK(memory && find(rec, STREAM, stream));
    memset(memory->bytes + (address - (uint64_t)(uintptr_t)memory->bytes), byte, bytes);
    LEAVE;
}

static int rec_launch(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err)
{
    (void)device, (void)err;
    ENTER;
    CHECK(find(rec, STREAM, stream));
    CHECK_EQ(kernel->run(kernel->arg), 0);
    if (kernel->drop)
        kernel->drop(kernel->arg);
    LEAVE;
}

void recorder_open(recorder *rec, int devices)
{
    *rec = (recorder){
        .table =
            {
                .name = "recorder",
                .close = rec_close,
                .device_count = rec_device_count,
                .device_info = rec_device_info,
                .memory_info = rec_memory_info,
                .peer_capable = rec_peer_capable,
                .peer_enable = rec_peer_enable,
                .device_alloc = rec_device_alloc,
                .device_free = rec_device_free,
                .host_alloc = rec_host_alloc,
                .host_free = rec_host_free,
                .stream_create = rec_stream_create,
                .stream_destroy = rec_stream_destroy,
                .stream_query = rec_stream_query,
                .stream_wait = rec_stream_wait,
                .event_create = rec_event_create,
                .event_destroy = rec_event_destroy,
                .event_record = rec_event_record,
                .event_query = rec_event_query,
                .event_elapsed = rec_event_elapsed,
                .copy = rec_copy,
                .fill = rec_fill,
                .launch = rec_launch,
            },
        .devices = devices,
        .peer_capable = 1,
        .peer_enabled = 1,
    };
    pthread_mutex_init(&rec->lock, NULL);
}

void recorder_close(recorder *rec)
{
    CHECK_EQ(rec->live, 0);
    CHECK_EQ(rec->closed, 1);
    pthread_mutex_destroy(&rec->lock);
}

void recorder_clear(recorder *rec)
{
    rec->log[0] = '\0';
}

int recorder_count(const recorder *rec, const char *start)
{
    int found = 0;
    for (const char *line = rec->log; *line; line = strchr(line, '\n') + 1)
        found += strncmp(line, start, strlen(start)) == 0;
    return found;
}

void recorder_forget(recorder *rec)
{
    while (rec->blocks)
        destroy(rec, rec->blocks, NULL);
}

void recorded_link_open(recorded_link *on, const recorder_names *names, int dst_device, const xd_link_options *options,
                        uint64_t bytes, int with_faults)
{
    xd_error err;
    recorder_open(&on->rec, 2);
    on->rec.names = names ? *names : (recorder_names){0};
    xd_driver *driver = &on->rec.table;
    on->fault = NULL;
    if (with_faults) {
        OK(xd_fault_create(&on->fault, driver, &err));
        driver = on->fault;
    }
    OK(xd_runtime_open(&on->runtime, driver, NULL, &err));
    for (int device = 0; device < 2; device++)
        OK(xd_stream_open(&on->streams[device], on->runtime, device, &err));
    OK(xd_link_open(&on->link, on->runtime, 0, dst_device, options, &err));
    OK(xd_buffer_open(&on->src, on->runtime, 0, bytes, &err));
    OK(xd_buffer_open(&on->dst, on->runtime, dst_device, bytes, &err));
    xd_event **const events[] = {&on->ready, &on->space, &on->released, &on->arrived};
    for (int i = 0; i < 4; i++)
        OK(xd_event_open(events[i], on->runtime, 0, &err));
    OK(xd_event_record(on->ready, on->streams[0], &err));
    OK(xd_event_record(on->space, on->streams[dst_device], &err));
    on->order = (xd_copy){
        .dst = xd_buffer_address(on->dst),
        .src = xd_buffer_address(on->src),
        .width = bytes,
        .height = 1,
        .source_ready = on->ready,
        .dest_free = on->space,
        .released = on->released,
        .arrived = on->arrived,
    };
}

void recorded_link_close(recorded_link *on)
{
    xd_error err;
    xd_link_close(&on->link);
    xd_event **const events[] = {&on->ready, &on->space, &on->released, &on->arrived};
    for (int i = 0; i < 4; i++)
        xd_event_close(events[i]);
    xd_buffer_close(&on->src);
    xd_buffer_close(&on->dst);
    for (int device = 0; device < 2; device++)
        xd_stream_close(&on->streams[device]);
    CHECK_NOTHING_LIVES(on->runtime);
    OK(xd_runtime_close(&on->runtime, &err));
    recorder_close(&on->rec);
}
