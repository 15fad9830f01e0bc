/* The loader's inner loop: file range -> page-locked tile -> device. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

#include "hash.h"
#include "marks.h"
#include "work.h"

enum {
    TILES = 32,
    TILE_BYTES = 1 << 20,
    LARGEST_TILE = 1 << 30, /* below 0x7ffff000, what one read call gives at most */
    LOOK = 20000000         /* ns between two looks at the stop flag */
};

/* One device's side of it. */
typedef struct lane {
    xd_stream *stream; /* NULL if there is no work */
    _Atomic uint64_t done, direct, last; /* bytes handed over, of them read directly, and when the last of them were */
} lane;

struct xd_reader {
    xd_runtime *runtime;
    const xd_io *calls;
    xd_ring *ring; /* NULL if there is nothing to read */
    _Atomic uint64_t reading, waiting; /* ns of all workers in reads, and for tiles and uploads */
    int sync_uploads, io, verify;

    pthread_mutex_t lock;
    pthread_cond_t left; /* a worker has left */
    unsigned workers;
    atomic_int stop; /* the status that the workers end with */
    xd_error first;  /* the error behind it */
    _Atomic int64_t failed;

    xd_work *work;
    xd_marks marks; /* under verify, of every copy so far */
    lane lanes[]; /* one a device */
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

/* Streams for the lanes with work, and a ring if there is any. */
static int open_devices(xd_reader *reader, unsigned tiles, uint64_t tile_bytes, xd_error *err)
{
    int status = XD_OK, work = 0;
    for (int device = 0; device < reader->runtime->devices && !status; device++) {
        lane *lane = &reader->lanes[device];
        if (!xd_work_total(reader->work, device))
            continue;
        work = 1;
        status = xd_stream_open(&lane->stream, reader->runtime, device, err);
    }
    return status || !work ? status : xd_ring_open(&reader->ring, reader->runtime, tiles, tile_bytes, err);
}

static void close_devices(xd_reader *reader)
{
    xd_ring_close(&reader->ring);
    for (int device = 0; device < reader->runtime->devices; device++)
        xd_stream_close(&reader->lanes[device].stream);
}

int xd_reader_open(xd_reader **out, xd_runtime *runtime, const xd_piece *pieces, size_t count,
                   const xd_reader_options *options, xd_error *err)
{
    static const char operation[] = "reader_open";
    int status = xd_runtime_enter(runtime, operation, err);
    if (status)
        return status;
    xd_reader_options chosen = options ? *options : (xd_reader_options){0};
    unsigned tiles = chosen.tiles ? chosen.tiles : TILES;
    uint64_t tile_bytes = chosen.tile_bytes ? chosen.tile_bytes : TILE_BYTES;
    if (tile_bytes > LARGEST_TILE)
        return xd_fail(err, XD_INVALID, 0, operation, "tiles of %" PRIu64 " bytes; at most %d are allowed", tile_bytes,
                       LARGEST_TILE);
    for (size_t i = 0; i < count && !status; i++)
        status = check_piece(runtime, &pieces[i], i, tile_bytes, err);
    if (status)
        return status;

    xd_reader *reader = xd_new(sizeof *reader + (size_t)runtime->devices * sizeof reader->lanes[0], operation, err);
    if (!reader)
        return XD_NO_HOST_MEMORY;
    reader->runtime = runtime;
    reader->sync_uploads = chosen.sync_uploads;
    reader->io = chosen.io;
    reader->verify = chosen.verify;
    reader->calls = chosen.calls ? chosen.calls : &xd_source_calls;
    reader->failed = -1;
    status = xd_work_open(&reader->work, runtime->devices, pieces, count, tile_bytes, err);
    if (status)
        goto free_reader;
    status = open_devices(reader, tiles, tile_bytes, err);
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

/* ---- the queue ---- */

/* Returns 0 when there is no next job, or none is to be done any more. *device: served before, and now. */
static int take(xd_reader *reader, int *device, xd_job *job)
{
    int got = 0;
    pthread_mutex_lock(&reader->lock);
    if (!reader->stop)
        got = xd_work_take(reader->work, device, job);
    else
        xd_work_leave(reader->work, *device);
    pthread_mutex_unlock(&reader->lock);
    return got;
}

static int settle(xd_reader *reader, int device, int on, xd_error *err)
{
    xd_driver *driver = reader->runtime->driver;
    return driver->settle && device >= 0 ? driver->settle(driver, device, on, err) : XD_OK;
}

/* The worker's thread leaves one device for another; -1 is none. *settled follows. */
static int move(xd_reader *reader, int *settled, int device, xd_error *err)
{
    int status = XD_OK;
    if (*settled == device)
        return status;
    status = settle(reader, *settled, 0, err);
    *settled = -1;
    if (!status)
        status = settle(reader, device, 1, err);
    if (!status)
        *settled = device;
    return status;
}

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

/* ---- tile -> device ---- */

static int copy(xd_reader *reader, const xd_transfer *transfer, xd_error *err)
{
    int status = reader->verify ? xd_marks_add(&reader->marks, &reader->lock, transfer, err) : XD_OK;
    return status ? status : xd_stream_copy(reader->lanes[transfer->dst_device].stream, transfer, err);
}

static int upload(xd_reader *reader, const xd_job *job, const char *memory, int direct, xd_error *err)
{
    const xd_extent *extent = &job->extent;
    xd_transfer transfer = {.dst_device = job->device, .src_device = XD_HOST, .height = 1};
    if (!direct) {
        transfer.dst = job->address;
        transfer.src = (uint64_t)(uintptr_t)memory;
        transfer.width = extent->bytes;
        return copy(reader, &transfer, err);
    }
    int status = XD_OK;
    for (int i = 0; i < extent->spans && !status; i++) {
        const xd_span *span = &extent->span[i];
        transfer.dst = job->address + span->at;
        transfer.src = (uint64_t)(uintptr_t)memory + xd_source_direct_at(extent, span->offset);
        transfer.width = span->bytes;
        status = copy(reader, &transfer, err);
    }
    return status;
}

/* Waits until the device has what was uploaded so far, or the reader is stopped. */
static int wait_uploads(xd_reader *reader, xd_event *event, int device, xd_error *err)
{
    int done = 0;
    uint64_t begin = xd_monotonic();
    int status = xd_event_record(event, reader->lanes[device].stream, err);
    while (!status && !done && !reader->stop)
        status = xd_event_wait(event, LOOK, &done, err);
    reader->waiting += xd_monotonic() - begin;
    return status;
}

static int acquire(xd_reader *reader, xd_tile *tile, int *got, xd_error *err)
{
    int status = XD_OK;
    uint64_t begin = xd_monotonic();
    *got = 0;
    while (!status && !*got && !reader->stop)
        status = xd_ring_acquire(reader->ring, LOOK, tile, got, err);
    reader->waiting += xd_monotonic() - begin;
    return status;
}

/* *reading tells whether it was the file that failed. */
static int run_job(xd_reader *reader, const xd_job *job, xd_event *event, int *reading, xd_error *err)
{
    xd_tile tile;
    int got, direct = 0;
    *reading = 0;
    int status = acquire(reader, &tile, &got, err);
    if (!got)
        return status;
    status = xd_host_access(reader->runtime, tile.address, tile.bytes, 1, err);
    if (!status) {
        uint64_t begin = xd_monotonic();
        status = xd_source_read(job->source, reader->calls, reader->io, &job->extent, tile.address, &direct, err);
        reader->reading += xd_monotonic() - begin;
        *reading = status != XD_OK;
    }
    if (status) {
        xd_ring_release(reader->ring, &tile);
        return status;
    }
    status = upload(reader, job, tile.address, direct, err);
    /* Part of it may be on its way, so the tile is submitted after an error too. */
    xd_error ignored;
    int submitted = xd_ring_submit(reader->ring, &tile, reader->lanes[job->device].stream, status ? &ignored : err);
    if (!status)
        status = submitted;
    if (!status && event)
        status = wait_uploads(reader, event, job->device, err);
    if (!status) {
        reader->lanes[job->device].done += job->payload;
        reader->lanes[job->device].last = xd_monotonic();
        reader->lanes[job->device].direct += direct ? job->payload : 0;
    }
    return status;
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

int xd_reader_run(xd_reader *reader, xd_error *err)
{
    int status = xd_runtime_enter(reader->runtime, "reader_run", err);
    if (status)
        return status;
    xd_error own;
    xd_event *event = NULL;
    xd_job job = {.row = 0};
    int reading = 0, device = -1, settled = -1;
    count_worker(reader, 1, NULL);
    if (reader->sync_uploads)
        status = xd_event_open(&event, reader->runtime, 0, &own);
    while (!status && take(reader, &device, &job)) {
        status = move(reader, &settled, device, &own);
        if (!status)
            status = run_job(reader, &job, event, &reading, &own);
    }
    move(reader, &settled, -1, NULL);
    xd_event_close(&event);
    if (status)
        stop(reader, status, &own, reading ? (int64_t)job.row : -1);
    return count_worker(reader, -1, err);
}

/* ---- device -> tile ---- */

static int next_mark(xd_reader *reader, xd_mark *out)
{
    pthread_mutex_lock(&reader->lock);
    int got = !reader->stop && xd_marks_take(&reader->marks, out);
    pthread_mutex_unlock(&reader->lock);
    return got;
}

/* Copies back what a mark stands for and compares the checksums. */
static int check_mark(xd_reader *reader, const xd_mark *mark, xd_event *event, xd_error *err)
{
    xd_tile tile;
    int got;
    int status = acquire(reader, &tile, &got, err);
    if (!got)
        return status;
    xd_transfer transfer = {.dst_device = XD_HOST, .src_device = mark->device, .dst = (uint64_t)(uintptr_t)tile.address,
                            .src = mark->address, .width = mark->bytes, .height = 1};
    status = xd_stream_copy(reader->lanes[mark->device].stream, &transfer, err);
    if (!status)
        status = wait_uploads(reader, event, mark->device, err);
    if (!status && !reader->stop)
        status = xd_host_access(reader->runtime, tile.address, mark->bytes, 0, err);
    uint64_t hash = status || reader->stop ? mark->hash : xd_hash(tile.address, (size_t)mark->bytes);
    if (!status && hash != mark->hash)
        status = xd_fail(err, XD_DRIVER, 0, "verify",
                         "device %d does not hold what was read: checksum %016" PRIx64 " of %" PRIu64
                         " bytes at 0x%" PRIx64 ", wanted %016" PRIx64,
                         mark->device, hash, mark->bytes, mark->address, mark->hash);
    xd_error ignored;
    int submitted = xd_ring_submit(reader->ring, &tile, reader->lanes[mark->device].stream, status ? &ignored : err);
    return status ? status : submitted;
}

int xd_reader_verify(xd_reader *reader, xd_error *err)
{
    int status = xd_runtime_enter(reader->runtime, "reader_verify", err);
    if (status)
        return status;
    xd_error own;
    xd_event *event = NULL;
    xd_mark mark;
    int settled = -1;
    count_worker(reader, 1, NULL);
    status = xd_event_open(&event, reader->runtime, 0, &own);
    while (!status && next_mark(reader, &mark)) {
        status = move(reader, &settled, mark.device, &own);
        if (!status)
            status = check_mark(reader, &mark, event, &own);
    }
    move(reader, &settled, -1, NULL);
    xd_event_close(&event);
    if (status)
        stop(reader, status, &own, -1);
    return count_worker(reader, -1, err);
}

/* ---- for the caller ---- */

int xd_reader_drain(xd_reader *reader, xd_error *err)
{
    xd_event *event;
    int status = xd_event_open(&event, reader->runtime, 0, err);
    if (status)
        return status;
    for (int device = 0; device < reader->runtime->devices && !status; device++)
        if (reader->lanes[device].stream)
            status = wait_uploads(reader, event, device, err);
    xd_event_close(&event);
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
    const lane *lane = &reader->lanes[device];
    *out = (xd_progress){.done = lane->done, .direct = lane->direct, .last = lane->last};
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
