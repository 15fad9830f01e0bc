/* The loader's inner loop: file range -> page-locked tile -> device. */
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>

#include "worker.h"

enum {
    TILES = 16,
    TILE_BYTES = 2 << 20,
    WORKERS = 4,
    MOST_WORKERS = 64,
    STREAMS = 1,
    LARGEST_TILE = 1 << 30 /* below 0x7ffff000, what one read call gives at most */
};

/* ---- open and close ---- */

static int check_piece(const xd_runtime *runtime, const xd_piece *piece, size_t index, uint64_t tile_bytes, xd_error *err)
{
    int status = xd_runtime_check_device(runtime, piece->device, "reader_open", err);
    if (status)
        return status;
    uint64_t end;
    if (piece->fd < 0 || __builtin_add_overflow(piece->offset, piece->bytes, &end) || end > INT64_MAX ||
        __builtin_add_overflow(piece->address, piece->bytes, &end))
        return xd_fail(err, XD_INVALID, 0, "reader_open",
                       "piece %zu: %" PRIu64 " bytes at offset %" PRIu64 " of descriptor %d to 0x%" PRIx64
                       "; an open descriptor and ranges below 2^63 are allowed",
                       index, piece->bytes, piece->offset, piece->fd, piece->address);
    if (piece->direct_fd >= 0 && tile_bytes % XD_SOURCE_PAGE)
        return xd_fail(err, XD_INVALID, 0, "reader_open",
                       "tiles of %" PRIu64 " bytes; for direct I/O a multiple of %d is allowed", tile_bytes, XD_SOURCE_PAGE);
    return XD_OK;
}

/* Streams for the lanes with work, and a ring if there is any and none was given. */
static int open_devices(xd_reader *reader, xd_ring *given, unsigned tiles, uint64_t tile_bytes, xd_error *err)
{
    int status = XD_OK, work = 0;
    for (int device = 0; device < reader->runtime->devices && !status; device++) {
        xd_lane *lane = &reader->lanes[device];
        if (!xd_work_total(reader->work, device))
            continue;
        work = 1;
        for (unsigned i = 0; i < reader->streams && !status; i++)
            status = xd_stream_open(&lane->streams[i], reader->runtime, device, err);
    }
    if (!status && given)
        reader->ring = given;
    return status || given || !work ? status
                                    : xd_ring_open(&reader->ring, reader->runtime, tiles, tile_bytes, err);
}

static void close_devices(xd_reader *reader)
{
    xd_ring_close(&reader->ring);
    for (int device = 0; device < reader->runtime->devices; device++)
        for (unsigned i = 0; i < reader->streams; i++)
            xd_stream_close(&reader->lanes[device].streams[i]);
}

int xd_reader_open(xd_reader **out, xd_runtime *runtime, const xd_piece *pieces, size_t count,
                   const xd_reader_options *options, xd_error *err)
{
    static const char operation[] = "reader_open";
    int status = xd_runtime_enter(runtime, operation, err);
    if (status)
        return status;
    xd_reader_options chosen = options ? *options : (xd_reader_options){0};
    xd_ring *given = chosen.ring;
    status = given ? xd_runtime_check_same(runtime, xd_ring_runtime(given), operation, err) : XD_OK;
    if (status)
        return status;
    unsigned tiles = given ? xd_ring_tiles(given) : chosen.tiles ? chosen.tiles : TILES;
    uint64_t tile_bytes = given ? xd_ring_tile_bytes(given) : chosen.tile_bytes ? chosen.tile_bytes : TILE_BYTES;
    if (tile_bytes > LARGEST_TILE)
        return xd_fail(err, XD_INVALID, 0, operation, "tiles of %" PRIu64 " bytes; at most %d are allowed", tile_bytes,
                       LARGEST_TILE);
    if (chosen.streams > XD_READER_STREAMS)
        return xd_fail(err, XD_INVALID, 0, operation, "%u streams of a device; at most %d are allowed", chosen.streams,
                       XD_READER_STREAMS);
    if (chosen.workers > MOST_WORKERS)
        return xd_fail(err, XD_INVALID, 0, operation, "%u workers; at most %d are allowed", chosen.workers, MOST_WORKERS);
    for (size_t i = 0; i < count && !status; i++)
        status = check_piece(runtime, &pieces[i], i, tile_bytes, err);
    if (status)
        return status;

    xd_reader *reader = xd_new(sizeof *reader + (size_t)runtime->devices * sizeof reader->lanes[0], operation, err);
    if (!reader)
        return XD_NO_HOST_MEMORY;
    reader->runtime = runtime;
    reader->sync_uploads = chosen.sync_uploads || (given && xd_ring_is_pageable(given));
    reader->io = chosen.io;
    reader->verify = chosen.verify;
    reader->together = chosen.workers ? chosen.workers : WORKERS;
    reader->tiles_each = tiles / reader->together;
    reader->streams = chosen.streams ? chosen.streams : STREAMS;
    reader->calls = chosen.calls ? chosen.calls : &xd_source_calls;
    reader->failed = -1;
    status = xd_work_open(&reader->work, runtime->devices, pieces, count, tile_bytes, err);
    if (status)
        goto free_reader;
    status = open_devices(reader, given, tiles, tile_bytes, err);
    if (status)
        goto close_work;
    pthread_mutex_init(&reader->lock, NULL);
    xd_condition_open(&reader->left);
    xd_runtime_count(runtime, XD_LIVE_READERS, 1);
    *out = reader;
    return XD_OK;

close_work:
    close_devices(reader);
    xd_work_close(&reader->work);
free_reader:
    free(reader);
    return status;
}

void xd_reader_close(xd_reader **at)
{
    xd_reader *reader = at ? *at : NULL;
    if (!reader)
        return;
    if (xd_runtime_owned(reader->runtime)) { /* a forked child has none of the workers */
        xd_reader_cancel(reader);
        pthread_mutex_lock(&reader->lock);
        while (reader->workers)
            pthread_cond_wait(&reader->left, &reader->lock);
        pthread_mutex_unlock(&reader->lock);
    }
    close_devices(reader);
    pthread_cond_destroy(&reader->left);
    pthread_mutex_destroy(&reader->lock);
    xd_runtime_count(reader->runtime, XD_LIVE_READERS, -1);
    xd_work_close(&reader->work);
    xd_marks_close(&reader->marks);
    free(reader);
    *at = NULL;
}

/* ---- workers ---- */

/* The first error wins; the other workers see the flag and stop. */
static void stop(xd_reader *reader, int status, const xd_error *why, int64_t row)
{
    pthread_mutex_lock(&reader->lock);
    if (!reader->stop) {
        reader->first = *why;
        reader->failed = row;
        reader->stop = status;
    }
    pthread_mutex_unlock(&reader->lock);
}

/* Counts a worker in or out, or neither. Returns the status that all end with. */
static int count_worker(xd_reader *reader, int change, xd_error *err)
{
    pthread_mutex_lock(&reader->lock);
    reader->workers += (unsigned)change;
    if (!reader->workers)
        pthread_cond_broadcast(&reader->left);
    int status = reader->stop;
    if (status && err)
        *err = reader->first;
    pthread_mutex_unlock(&reader->lock);
    return status;
}

static int run(xd_reader *reader, int back, xd_error *err)
{
    int status = xd_runtime_enter(reader->runtime, "reader_run", err);
    if (status)
        return status;
    xd_error own;
    int64_t row;
    count_worker(reader, 1, NULL);
    status = xd_worker_run(reader, back, &row, &own);
    if (status)
        stop(reader, status, &own, row);
    return count_worker(reader, -1, err);
}

int xd_reader_run(xd_reader *reader, xd_error *err)
{
    return run(reader, 0, err);
}

int xd_reader_verify(xd_reader *reader, xd_error *err)
{
    return run(reader, 1, err);
}

typedef struct task {
    xd_reader *reader;
    int verify;
} task;

static void *run_on_a_thread(void *arg)
{
    const task *mine = arg;
    xd_error kept_by_the_reader;
    run(mine->reader, mine->verify, &kept_by_the_reader);
    return NULL;
}

/* The threads take no signals: the caller's process may want them on threads of its own. */
int xd_reader_run_all(xd_reader *reader, int verify, xd_error *err)
{
    task each = {.reader = reader, .verify = verify};
    pthread_t threads[MOST_WORKERS];
    unsigned started = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started + 1 < reader->together &&
           pthread_create(&threads[started], NULL, run_on_a_thread, &each) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    int status = run(reader, verify, err);
    while (started)
        pthread_join(threads[--started], NULL);
    return status ? status : count_worker(reader, 0, err);
}

void xd_reader_cancel(xd_reader *reader)
{
    xd_error why;
    xd_fail(&why, XD_CANCELLED, 0, "reader_run", "cancelled before everything was read");
    stop(reader, XD_CANCELLED, &why, -1);
}

int xd_reader_progress(const xd_reader *reader, int device, xd_progress *out)
{
    if (device < 0 || device >= reader->runtime->devices)
        return 0;
    const xd_lane *lane = &reader->lanes[device];
    *out = (xd_progress){.done = lane->done, .direct = lane->direct, .first = lane->first, .last = lane->last};
    return 1;
}

void xd_reader_times(const xd_reader *reader, uint64_t *reading, uint64_t *waiting)
{
    *reading = reader->reading;
    *waiting = reader->waiting;
}

int xd_reader_refused(const xd_reader *reader, int fd)
{
    const xd_source *source = xd_work_source(reader->work, fd);
    return source ? source->refused : 0;
}

int64_t xd_reader_failed(const xd_reader *reader)
{
    return reader->failed;
}
