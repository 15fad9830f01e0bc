#include "job.h"

#include "check.h"

enum { BYTES = 1000, TILE = 300, ROUNDS = 4 };

typedef struct job {
    xd_runtime *runtime;
    xd_stream *streams[2];
    xd_buffer *host, *ends[2];
    xd_event *ready, *released, *arrived, *down;
    xd_link *there, *back;
    xd_ring *ring;
    xd_throttle *throttle;
} job;

#define TRY(call)                \
    do {                         \
        int status_ = (call);    \
        if (status_)             \
            return status_;      \
    } while (0)

static int open_all(job *j, xd_driver *driver, int path, xd_error *err)
{
    xd_link_options options = {.path = path, .tile_bytes = TILE, .tiles = 2, .gate = 1};
    TRY(xd_runtime_open(&j->runtime, driver, NULL, err));
    for (int device = 0; device < 2; device++) {
        TRY(xd_stream_open(&j->streams[device], j->runtime, device, err));
        TRY(xd_buffer_open(&j->ends[device], j->runtime, device, BYTES, err));
    }
    TRY(xd_buffer_open(&j->host, j->runtime, XD_HOST, 2 * BYTES, err));
    xd_event **const events[] = {&j->ready, &j->released, &j->arrived, &j->down};
    for (int i = 0; i < 4; i++)
        TRY(xd_event_open(events[i], j->runtime, 0, err));
    TRY(xd_link_open(&j->there, j->runtime, 0, 1, &options, err));
    TRY(xd_link_open(&j->back, j->runtime, 1, 0, &options, err));
    TRY(xd_ring_open(&j->ring, j->runtime, 2, TILE, err));
    return xd_throttle_open(&j->throttle, j->runtime, 2, err);
}

/* host -> tiles -> device 0 -> device 1 -> device 0 -> host */
static int round_trip(job *j, int step, xd_error *err)
{
    unsigned char *sent = (unsigned char *)(uintptr_t)xd_buffer_address(j->host), *received = sent + BYTES;
    uint64_t near = xd_buffer_address(j->ends[0]), far = xd_buffer_address(j->ends[1]);
    for (int i = 0; i < BYTES; i++) {
        sent[i] = (unsigned char)(i * 7 + step);
        received[i] = 0xA5;
    }
    int admitted = 0;
    TRY(xd_throttle_admit(j->throttle, XD_FOREVER, &admitted, err));
    CHECK_EQ(admitted, 1);
    for (int at = 0; at < BYTES; at += TILE) {
        int bytes = TILE < BYTES - at ? TILE : BYTES - at, got = 0;
        xd_tile tile;
        TRY(xd_ring_acquire(j->ring, XD_FOREVER, &tile, &got, err));
        CHECK_EQ(got, 1);
        memcpy(tile.address, sent + at, (size_t)bytes);
        xd_transfer up = {.dst_device = 0, .src_device = XD_HOST, .dst = near + (uint64_t)at,
                          .src = (uint64_t)(uintptr_t)tile.address, .width = (uint64_t)bytes, .height = 1};
        int status = xd_stream_copy(j->streams[0], &up, err);
        int submitted = xd_ring_submit(j->ring, &tile, j->streams[0], status ? NULL : err);
        TRY(status ? status : submitted);
    }
    TRY(xd_event_record(j->ready, j->streams[0], err));
    TRY(xd_link_copy(j->there,
                     &(xd_copy){.dst = far, .src = near, .width = BYTES, .height = 1, .source_ready = j->ready,
                                .released = j->released, .arrived = j->arrived},
                     err));
    TRY(xd_stream_wait(j->streams[0], j->released, err));
    TRY(xd_stream_fill(j->streams[0], near, 0xEE, BYTES, err));
    TRY(xd_event_record(j->ready, j->streams[0], err));
    TRY(xd_link_copy(j->back,
                     &(xd_copy){.dst = near, .src = far, .width = BYTES, .height = 1, .source_ready = j->arrived,
                                .dest_free = j->ready, .arrived = j->down},
                     err));
    TRY(xd_stream_wait(j->streams[0], j->down, err));
    xd_transfer down = {.dst_device = XD_HOST, .src_device = 0, .dst = (uint64_t)(uintptr_t)received, .src = near,
                        .width = BYTES, .height = 1};
    TRY(xd_stream_copy(j->streams[0], &down, err));
    TRY(xd_throttle_retire(j->throttle, j->streams[0], err));
    TRY(xd_event_record(j->down, j->streams[0], err));
    int done = 0;
    TRY(xd_event_wait(j->down, XD_FOREVER, &done, err));
    CHECK_EQ(done, 1);
    TRY(xd_host_access(j->runtime, received, BYTES, 0, err));
    CHECK_EQ(memcmp(sent, received, BYTES), 0);
    TRY(xd_ring_drain(j->ring, err));
    unsigned in_flight;
    return xd_throttle_in_flight(j->throttle, &in_flight, err);
}

/* Buffers may go when nothing that is queued uses them: links have waited for theirs, streams are waited for here. */
static void quieten(job *j)
{
    for (int device = 0; device < 2; device++) {
        int done;
        if (j->down && j->streams[device] && !xd_event_record(j->down, j->streams[device], NULL))
            xd_event_wait(j->down, XD_FOREVER, &done, NULL);
    }
}

int job_run(xd_driver *driver, int path, xd_error *err)
{
    job j = {0};
    int status = open_all(&j, driver, path, err);
    for (int step = 0; step < ROUNDS && !status; step++)
        status = round_trip(&j, step, err);
    if (!j.runtime) {
        driver->close(driver);
        return status;
    }
    xd_throttle_close(&j.throttle);
    xd_link_close(&j.there);
    xd_link_close(&j.back);
    quieten(&j);
    xd_ring_close(&j.ring);
    xd_event **const events[] = {&j.ready, &j.released, &j.arrived, &j.down};
    for (int i = 0; i < 4; i++)
        xd_event_close(events[i]);
    xd_buffer_close(&j.host);
    for (int device = 0; device < 2; device++) {
        xd_buffer_close(&j.ends[device]);
        xd_stream_close(&j.streams[device]);
    }
    CHECK_NOTHING_LIVES(j.runtime);
    for (int device = 0; device < 2; device++) {
        uint64_t free_bytes, total;
        if (!xd_runtime_memory_info(j.runtime, device, &free_bytes, &total, NULL))
            CHECK_EQ(free_bytes, total);
    }
    CHECK_EQ(xd_runtime_close(&j.runtime, NULL), XD_OK);
    return status;
}
