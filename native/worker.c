/* A worker of the reader: it keeps tiles of its own, so that no worker waits for another and a tile stays with the
   processor that fills it. */
#include "worker.h"

#include <inttypes.h>

#include "hash.h"

enum { MAX_TILES = 8 };

typedef struct worker {
    xd_reader *reader;
    unsigned number;
    int device;  /* that it serves; -1: none yet */
    int settled; /* that its thread keeps current; -1: none */
    unsigned tiles, turn;
    struct {
        xd_tile tile;
        xd_event *free;    /* recorded after its last use */
        xd_stream *stream; /* of its last use; NULL: that is over */
    } own[MAX_TILES];
} worker;

/* ---- tiles ---- */

/* The first tile is waited for, more are taken if they are there. No tile and no error: the reader was stopped. */
static int take_tiles(worker *w, xd_error *err)
{
    xd_reader *reader = w->reader;
    unsigned wanted = reader->tiles_each < MAX_TILES ? reader->tiles_each : MAX_TILES;
    int got = 0, status = XD_OK;
    while (!status && !got && !reader->stop)
        status = xd_ring_acquire(reader->ring, XD_READER_LOOK, &w->own[0].tile, &got, err);
    while (!status && got) {
        status = xd_event_open(&w->own[w->tiles++].free, reader->runtime, 0, err);
        got = 0;
        if (!status && w->tiles < wanted)
            status = xd_ring_acquire(reader->ring, 0, &w->own[w->tiles].tile, &got, err);
    }
    return status;
}

/* What is still on its way after an error is left to the ring, which waits for it when it closes. */
static void give_tiles(worker *w)
{
    for (unsigned i = 0; i < w->tiles; i++) {
        if (w->own[i].stream)
            xd_ring_submit(w->reader->ring, &w->own[i].tile, w->own[i].stream, NULL);
        else
            xd_ring_release(w->reader->ring, &w->own[i].tile);
        xd_event_close(&w->own[i].free);
    }
}

/* Waits until a tile's last use is over, or the reader is stopped. */
static int wait_tile(worker *w, unsigned index, xd_error *err)
{
    int done = 0, status = XD_OK;
    if (!w->own[index].stream)
        return status;
    uint64_t begin = xd_monotonic();
    while (!status && !done && !w->reader->stop)
        status = xd_event_wait_napping(w->own[index].free, XD_READER_LOOK, &done, err);
    w->reader->waiting += xd_monotonic() - begin;
    if (done)
        w->own[index].stream = NULL;
    return status;
}

static int wait_tiles(worker *w, xd_error *err)
{
    int status = XD_OK;
    for (unsigned i = 0; i < w->tiles && !status; i++)
        status = wait_tile(w, i, err);
    return status;
}

/* ---- devices ---- */

static xd_stream *stream_of(const worker *w, int device)
{
    return w->reader->lanes[device].streams[w->number % w->reader->streams];
}

static int settle(worker *w, int device, int on, xd_error *err)
{
    xd_driver *driver = w->reader->runtime->driver;
    return driver->settle && device >= 0 ? driver->settle(driver, device, on, err) : XD_OK;
}

/* The thread leaves one device for another; -1 is none. */
static int move(worker *w, int device, xd_error *err)
{
    int before = w->settled;
    if (before == device)
        return XD_OK;
    w->settled = -1;
    int status = settle(w, before, 0, err);
    if (!status)
        status = settle(w, device, 1, err);
    if (!status)
        w->settled = device;
    return status;
}

/* ---- file -> tile -> device ---- */

/* Returns 0 when there is no next job, or none is to be done any more. */
static int next_job(worker *w, xd_job *job)
{
    xd_reader *reader = w->reader;
    int got = 0;
    pthread_mutex_lock(&reader->lock);
    if (!reader->stop)
        got = xd_work_take(reader->work, &w->device, job);
    else
        xd_work_leave(reader->work, w->device);
    pthread_mutex_unlock(&reader->lock);
    return got;
}

static int copy(worker *w, const xd_transfer *transfer, xd_error *err)
{
    xd_reader *reader = w->reader;
    int status = reader->verify ? xd_marks_add(&reader->marks, &reader->lock, transfer, err) : XD_OK;
    return status ? status : xd_stream_copy(stream_of(w, transfer->dst_device), transfer, err);
}

static int upload(worker *w, const xd_job *job, const char *memory, int direct, xd_error *err)
{
    const xd_extent *extent = &job->extent;
    xd_transfer transfer = {.dst_device = job->device, .src_device = XD_HOST, .height = 1};
    if (!direct) {
        transfer.dst = job->address;
        transfer.src = (uint64_t)(uintptr_t)memory;
        transfer.width = extent->bytes;
        return copy(w, &transfer, err);
    }
    int status = XD_OK;
    for (int i = 0; i < extent->spans && !status; i++) {
        const xd_span *span = &extent->span[i];
        transfer.dst = job->address + span->at;
        transfer.src = (uint64_t)(uintptr_t)memory + xd_source_direct_at(extent, span->offset);
        transfer.width = span->bytes;
        status = copy(w, &transfer, err);
    }
    return status;
}

static int read_job(worker *w, const xd_job *job, char *memory, int *direct, xd_error *err)
{
    xd_reader *reader = w->reader;
    uint64_t begin = xd_monotonic();
    int status = xd_source_read(job->source, reader->calls, reader->io, &job->extent, memory, direct, err);
    reader->reading += xd_monotonic() - begin;
    return status;
}

/* *row is set if it was the file that failed. */
static int run_job(worker *w, const xd_job *job, int64_t *row, xd_error *err)
{
    xd_reader *reader = w->reader;
    unsigned index = w->turn++ % w->tiles;
    const xd_tile *tile = &w->own[index].tile;
    xd_lane *lane = &reader->lanes[job->device];
    int direct;
    int status = wait_tile(w, index, err);
    if (status || reader->stop)
        return status;
    status = xd_host_access(reader->runtime, tile->address, tile->bytes, 1, err);
    if (status)
        return status;
    status = read_job(w, job, tile->address, &direct, err);
    if (status) {
        *row = (int64_t)job->row;
        return status;
    }
    xd_stream *stream = w->own[index].stream = stream_of(w, job->device); /* even a copy that fails may have begun */
    status = upload(w, job, tile->address, direct, err);
    if (!status)
        status = xd_event_record(w->own[index].free, stream, err);
    if (!status && reader->sync_uploads)
        status = wait_tile(w, index, err);
    if (status)
        return status;
    lane->done += job->payload;
    lane->direct += direct ? job->payload : 0;
    uint64_t begun = 0;
    lane->last = xd_monotonic();
    atomic_compare_exchange_strong(&lane->first, &begun, lane->last);
    return XD_OK;
}

static int run_jobs(worker *w, int64_t *row, xd_error *err)
{
    xd_job job;
    int status = XD_OK;
    while (!status && next_job(w, &job)) {
        status = move(w, job.device, err);
        if (!status)
            status = run_job(w, &job, row, err);
    }
    return status ? status : wait_tiles(w, err);
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
static int check_mark(worker *w, const xd_mark *mark, xd_error *err)
{
    xd_reader *reader = w->reader;
    void *memory = w->own[0].tile.address;
    xd_stream *stream = stream_of(w, mark->device);
    xd_transfer transfer = {.dst_device = XD_HOST, .src_device = mark->device, .dst = (uint64_t)(uintptr_t)memory,
                            .src = mark->address, .width = mark->bytes, .height = 1};
    w->own[0].stream = stream;
    int status = xd_stream_copy(stream, &transfer, err);
    if (!status)
        status = xd_event_record(w->own[0].free, stream, err);
    if (!status)
        status = wait_tile(w, 0, err);
    if (status || reader->stop)
        return status;
    status = xd_host_access(reader->runtime, memory, mark->bytes, 0, err);
    uint64_t hash = status ? mark->hash : xd_hash(memory, (size_t)mark->bytes);
    if (hash == mark->hash)
        return status;
    return xd_fail(err, XD_DRIVER, 0, "verify",
                   "device %d does not hold what was read: checksum %016" PRIx64 " of %" PRIu64 " bytes at 0x%" PRIx64
                   ", wanted %016" PRIx64,
                   mark->device, hash, mark->bytes, mark->address, mark->hash);
}

static int check_marks(worker *w, xd_error *err)
{
    xd_mark mark;
    int status = XD_OK;
    while (!status && next_mark(w->reader, &mark)) {
        status = move(w, mark.device, err);
        if (!status)
            status = check_mark(w, &mark, err);
    }
    return status;
}

int xd_worker_run(xd_reader *reader, int back, int64_t *row, xd_error *err)
{
    worker w = {.reader = reader, .number = reader->joined++, .device = -1, .settled = -1};
    *row = -1;
    if (!reader->ring)
        return XD_OK;
    int status = take_tiles(&w, err);
    if (!status && w.tiles)
        status = back ? check_marks(&w, err) : run_jobs(&w, row, err);
    give_tiles(&w);
    move(&w, -1, NULL);
    return status;
}
