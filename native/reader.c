/* The loader's inner loop: file range -> page-locked tile -> device. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

#include "source.h"

enum {
    TILES = 32,
    TILE_BYTES = 1 << 20,
    LARGEST_TILE = 1 << 30, /* below 0x7ffff000, what one read call gives at most */
    LOOK = 20000000         /* ns between two looks at the stop flag */
};

struct xd_reader {
    xd_runtime *runtime;
    const xd_io *calls;
    xd_ring *ring;       /* NULL if there is nothing to read */
    xd_stream **streams; /* one a device; NULL for devices without pieces */
    _Atomic uint64_t *done, *last; /* one a device: bytes, and the time of the last of them */
    _Atomic uint64_t direct;
    int sync_uploads, io;

    pthread_mutex_t lock;
    pthread_cond_t left; /* a worker has left */
    unsigned workers;
    atomic_int stop; /* the status that the workers end with */
    xd_error first;  /* the error behind it */
    _Atomic int64_t failed;
    size_t next;    /* the first piece that is not wholly taken */
    uint64_t taken; /* bytes of it */

    size_t piece_count, source_count;
    xd_piece *pieces;
    size_t *source_of; /* piece -> source */
    xd_source *sources;
};

/* What one tile takes: pieces that are neighbours in one file and on one device. The tile is an image of the device. */
typedef struct job {
    xd_source *source;
    size_t piece; /* the first */
    int device;
    uint64_t address;
    uint64_t payload; /* bytes that belong to pieces */
    xd_extent extent;
} job;

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

/* Keeps what has bytes. Pieces of one file usually come in a row, so the search begins at the last file. */
static void keep(xd_reader *reader, const xd_piece *piece)
{
    size_t i = reader->source_count;
    while (i && reader->sources[i - 1].fd != piece->fd)
        i--;
    if (!i) {
        i = ++reader->source_count;
        reader->sources[i - 1].fd = piece->fd;
        reader->sources[i - 1].direct_fd = piece->direct_fd;
    }
    reader->source_of[reader->piece_count] = i - 1;
    reader->pieces[reader->piece_count++] = *piece;
}

static void free_arrays(xd_reader *reader)
{
    free(reader->sources);
    free(reader->source_of);
    free(reader->pieces);
    free(reader->last);
    free(reader->done);
    free(reader->streams);
    free(reader);
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

    size_t devices = (size_t)runtime->devices;
    xd_reader *reader = xd_new(sizeof *reader, operation, err);
    if (!reader)
        return XD_NO_HOST_MEMORY;
    reader->runtime = runtime;
    reader->sync_uploads = chosen.sync_uploads;
    reader->io = chosen.io;
    reader->calls = chosen.calls ? chosen.calls : &xd_source_calls;
    reader->failed = -1;
    status = XD_NO_HOST_MEMORY;
    if (!(reader->streams = xd_new(devices * sizeof(reader->streams[0]), operation, err)) ||
        !(reader->done = xd_new(devices * sizeof(reader->done[0]), operation, err)) ||
        !(reader->last = xd_new(devices * sizeof(reader->last[0]), operation, err)) ||
        !(reader->pieces = xd_new((count + 1) * sizeof reader->pieces[0], operation, err)) ||
        !(reader->source_of = xd_new((count + 1) * sizeof reader->source_of[0], operation, err)) ||
        !(reader->sources = xd_new((count + 1) * sizeof reader->sources[0], operation, err)))
        goto close_arrays;
    status = XD_OK;
    for (size_t i = 0; i < count && !status; i++) {
        if (!pieces[i].bytes)
            continue;
        keep(reader, &pieces[i]);
        xd_stream **stream = &reader->streams[pieces[i].device];
        if (!*stream)
            status = xd_stream_open(stream, runtime, pieces[i].device, err);
    }
    if (!status && reader->piece_count)
        status = xd_ring_open(&reader->ring, runtime, tiles, tile_bytes, err);
    if (status)
        goto close_streams;
    pthread_mutex_init(&reader->lock, NULL);
    xd_condition_open(&reader->left);
    xd_runtime_count(runtime, XD_LIVE_READERS, 1);
    *out = reader;
    return XD_OK;

close_streams:
    for (size_t i = 0; i < devices; i++)
        xd_stream_close(&reader->streams[i]);
close_arrays:
    free_arrays(reader);
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
    xd_ring_close(&reader->ring);
    for (int i = 0; i < reader->runtime->devices; i++)
        xd_stream_close(&reader->streams[i]);
    pthread_cond_destroy(&reader->left);
    pthread_mutex_destroy(&reader->lock);
    xd_runtime_count(reader->runtime, XD_LIVE_READERS, -1);
    free_arrays(reader);
    *at = NULL;
}

/* ---- the queue ---- */

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Adds the next piece, or as much of it as fits, if it is a neighbour. Returns 0 when the job is complete without it. */
static int extend(xd_reader *reader, job *job, uint64_t limit)
{
    const xd_piece *piece = &reader->pieces[reader->next];
    xd_extent *extent = &job->extent;
    uint64_t room = xd_ring_tile_bytes(reader->ring);
    uint64_t offset = piece->offset + reader->taken;
    uint64_t at = piece->address + reader->taken - job->address; /* huge where the address is below the job's */
    if (job->source != &reader->sources[reader->source_of[reader->next]] || job->device != piece->device ||
        offset < extent->end || offset >= limit || at < extent->bytes || at >= room)
        return 0;
    uint64_t file_gap = offset - extent->end, gap = at - extent->bytes;
    int splits = file_gap != gap;
    if (gap >= XD_SOURCE_PAGE || file_gap > gap || (splits && extent->spans == XD_SOURCE_MAX_SPANS))
        return 0;
    uint64_t bytes = least(piece->bytes - reader->taken, least(limit - offset, room - at));
    /* What lies between in the file is read too, into bytes of the image that are nobody's either. */
    extent->span[extent->spans - 1].bytes += file_gap + (splits ? 0 : bytes);
    if (splits)
        extent->span[extent->spans++] = (xd_span){.offset = offset, .bytes = bytes, .at = at};
    extent->bytes = at + bytes;
    extent->end = offset + bytes;
    job->payload += bytes;
    reader->taken += bytes;
    return 1;
}

/* The next piece begins a job. */
static void begin(xd_reader *reader, job *job)
{
    const xd_piece *piece = &reader->pieces[reader->next];
    uint64_t offset = piece->offset + reader->taken;
    job->source = &reader->sources[reader->source_of[reader->next]];
    job->piece = reader->next;
    job->device = piece->device;
    job->address = piece->address + reader->taken;
    job->payload = 0;
    job->extent.spans = 1;
    job->extent.bytes = 0;
    job->extent.end = offset;
    job->extent.span[0] = (xd_span){.offset = offset};
}

/* Cuts the next job off the queue. Returns 0 when there is none, or none is to be done any more. */
static int take(xd_reader *reader, job *job)
{
    int got = 0;
    pthread_mutex_lock(&reader->lock);
    if (!reader->stop && reader->next < reader->piece_count) {
        begin(reader, job);
        uint64_t limit = xd_source_limit(job->source, job->extent.end, xd_ring_tile_bytes(reader->ring));
        while (reader->next < reader->piece_count && extend(reader, job, limit)) {
            if (reader->taken < reader->pieces[reader->next].bytes)
                break;
            reader->next++;
            reader->taken = 0;
        }
        got = 1;
    }
    pthread_mutex_unlock(&reader->lock);
    return got;
}

/* The first error wins; the other workers see the flag and stop. */
static void stop(xd_reader *reader, int status, const xd_error *why, int64_t piece)
{
    pthread_mutex_lock(&reader->lock);
    if (!reader->stop) {
        reader->first = *why;
        reader->failed = piece;
        reader->stop = status;
    }
    pthread_mutex_unlock(&reader->lock);
}

/* ---- tile -> device ---- */

static int upload(xd_reader *reader, const job *job, const char *memory, int direct, xd_error *err)
{
    const xd_extent *extent = &job->extent;
    xd_stream *stream = reader->streams[job->device];
    xd_transfer transfer = {.dst_device = job->device, .src_device = XD_HOST, .height = 1};
    if (!direct) {
        transfer.dst = job->address;
        transfer.src = (uint64_t)(uintptr_t)memory;
        transfer.width = extent->bytes;
        return xd_stream_copy(stream, &transfer, err);
    }
    int status = XD_OK;
    for (int i = 0; i < extent->spans && !status; i++) {
        const xd_span *span = &extent->span[i];
        transfer.dst = job->address + span->at;
        transfer.src = (uint64_t)(uintptr_t)memory + xd_source_direct_at(extent, span->offset);
        transfer.width = span->bytes;
        status = xd_stream_copy(stream, &transfer, err);
    }
    return status;
}

/* Waits until the device has what was uploaded so far, or the reader is stopped. */
static int wait_uploads(xd_reader *reader, xd_event *event, int device, xd_error *err)
{
    int done = 0;
    int status = xd_event_record(event, reader->streams[device], err);
    while (!status && !done && !reader->stop)
        status = xd_event_wait(event, LOOK, &done, err);
    return status;
}

/* *reading tells whether it was the file that failed. */
static int run_job(xd_reader *reader, const job *job, xd_event *event, int *reading, xd_error *err)
{
    xd_tile tile;
    int got = 0, direct = 0, status = XD_OK;
    *reading = 0;
    while (!status && !got && !reader->stop)
        status = xd_ring_acquire(reader->ring, LOOK, &tile, &got, err);
    if (!got)
        return status;
    status = xd_host_access(reader->runtime, tile.address, tile.bytes, 1, err);
    if (!status) {
        status = xd_source_read(job->source, reader->calls, reader->io, &job->extent, tile.address, &direct, err);
        *reading = status != XD_OK;
    }
    if (status) {
        xd_ring_release(reader->ring, &tile);
        return status;
    }
    status = upload(reader, job, tile.address, direct, err);
    /* Part of it may be on its way, so the tile is submitted after an error too. */
    xd_error ignored;
    int submitted = xd_ring_submit(reader->ring, &tile, reader->streams[job->device], status ? &ignored : err);
    if (!status)
        status = submitted;
    if (!status && event)
        status = wait_uploads(reader, event, job->device, err);
    if (!status) {
        reader->done[job->device] += job->payload;
        reader->last[job->device] = xd_monotonic();
        reader->direct += direct ? job->payload : 0;
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
    job job = {.piece = 0};
    int reading = 0;
    count_worker(reader, 1, NULL);
    if (reader->sync_uploads)
        status = xd_event_open(&event, reader->runtime, 0, &own);
    while (!status && take(reader, &job))
        status = run_job(reader, &job, event, &reading, &own);
    xd_event_close(&event);
    if (status)
        stop(reader, status, &own, reading ? (int64_t)job.piece : -1);
    return count_worker(reader, -1, err);
}

int xd_reader_drain(xd_reader *reader, xd_error *err)
{
    xd_event *event;
    int status = xd_event_open(&event, reader->runtime, 0, err);
    if (status)
        return status;
    for (int device = 0; device < reader->runtime->devices && !status; device++)
        if (reader->streams[device])
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

/* ---- what can be asked meanwhile ---- */

uint64_t xd_reader_done(const xd_reader *reader, int device)
{
    return device < 0 || device >= reader->runtime->devices ? 0 : reader->done[device];
}

uint64_t xd_reader_last(const xd_reader *reader, int device)
{
    return device < 0 || device >= reader->runtime->devices ? 0 : reader->last[device];
}

uint64_t xd_reader_direct(const xd_reader *reader)
{
    return reader->direct;
}

int xd_reader_refused(const xd_reader *reader, int fd)
{
    for (size_t i = 0; i < reader->source_count; i++)
        if (reader->sources[i].fd == fd)
            return reader->sources[i].refused;
    return 0;
}

int64_t xd_reader_failed(const xd_reader *reader)
{
    return reader->failed;
}
