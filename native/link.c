/*
 * One ordered pair of devices; the only place that chooses a path for a copy.
 *
 * Direct: one copy on `out`, a stream of the source device. Staged: tile by tile through a pinned ring, device to host
 * on `out`, host to device on `in`, a stream of the destination device; see docs/design.md for the order of the waits.
 * Tiles are of equal size, the square root of (what a tile costs beyond its bytes) x rate x (bytes of the copy): fewer
 * would overlap less, more would cost more.
 */
#include "internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#define TILE_COST 6.5e-6            /* seconds; measured on two H200 with PCIe gen5 x16 */
#define TILE_STEP UINT64_C(4096)    /* tiles are multiples of this */
#define TILE_LIMIT UINT64_C(8388608)
#define DEFAULT_RATE 50e9
#define DEFAULT_TILES 4

struct xd_link {
    xd_runtime *runtime;
    pthread_mutex_t lock;
    int src_device, dst_device;
    int path;
    uint64_t direct_from, direct_to;
    uint64_t tile_bytes; /* asked for; 0: fitted */
    double rate;
    int gate;
    int broken; /* a copy failed and what was queued of it could not be waited for */
    xd_stream *out;
    xd_stream *in; /* this and the next three: NULL where every copy is direct */
    xd_buffer *ring;
    xd_event *filled;   /* recorded on `out` for every tile: a stream that waits keeps the record it found */
    xd_event *freed[2]; /* recorded on `in` after the last tile of each half of the ring */
    uint64_t room;      /* bytes of a tile */
    unsigned tiles, next;
    int waited; /* `out` has been told to wait for the half that begins with the next tile */
};

/* ---- choices ---- */

static int is_staged(const xd_link *link, uint64_t bytes)
{
    if (link->path != XD_BY_SIZE)
        return link->path == XD_STAGED;
    if (link->src_device == link->dst_device)
        return 0;
    return bytes < link->direct_from || (link->direct_to && bytes >= link->direct_to);
}

/* Is there a size that is staged? */
static int can_stage(const xd_link *link)
{
    return is_staged(link, 0) || is_staged(link, UINT64_MAX);
}

int xd_link_path(const xd_link *link, uint64_t bytes)
{
    return is_staged(link, bytes) ? XD_STAGED : XD_DIRECT;
}

static uint64_t round_up(uint64_t bytes)
{
    return bytes > UINT64_MAX - TILE_STEP ? bytes : (bytes + TILE_STEP - 1) / TILE_STEP * TILE_STEP;
}

static uint64_t fit_tile(double rate, uint64_t bytes)
{
    double best = sqrt(TILE_COST * rate * (double)bytes);
    if (best >= (double)TILE_LIMIT)
        return TILE_LIMIT;
    if (best <= (double)TILE_STEP)
        return TILE_STEP;
    uint64_t tiles = (uint64_t)((double)bytes / best + 0.5);
    tiles = tiles ? tiles : 1;
    uint64_t tile = round_up(bytes / tiles + (bytes % tiles != 0));
    return tile < TILE_LIMIT ? tile : TILE_LIMIT;
}

uint64_t xd_link_tile(const xd_link *link, uint64_t bytes)
{
    uint64_t tile = link->tile_bytes ? link->tile_bytes : fit_tile(link->rate, bytes);
    return link->ring && link->room < tile ? link->room : tile;
}

/* The largest tile that a copy of this link can ask for. */
static uint64_t ring_tile(const xd_link *link, uint64_t max_bytes)
{
    uint64_t largest = max_bytes ? max_bytes : UINT64_MAX;
    if (!is_staged(link, largest) && link->direct_from)
        largest = link->direct_from - 1;
    if (!link->tile_bytes)
        return fit_tile(link->rate, largest);
    largest = round_up(largest ? largest : 1);
    return link->tile_bytes < largest ? link->tile_bytes : largest;
}

uint64_t xd_link_pinned_bytes(const xd_link *link)
{
    return link->ring ? xd_buffer_bytes(link->ring) : 0;
}

/* ---- open and close ---- */

static int check_options(const xd_link_options *options, xd_error *err)
{
    if (options->path != XD_DIRECT && options->path != XD_STAGED && options->path != XD_BY_SIZE)
        return xd_fail(err, XD_INVALID, 0, "link_open", "path is %d; allowed: direct (%d), staged (%d), by size (%d)",
                       options->path, XD_DIRECT, XD_STAGED, XD_BY_SIZE);
    if (options->path == XD_BY_SIZE && options->direct_to && options->direct_to <= options->direct_from)
        return xd_fail(err, XD_INVALID, 0, "link_open",
                       "direct_to is %" PRIu64 "; allowed: 0 (no end) or above direct_from, %" PRIu64,
                       options->direct_to, options->direct_from);
    if (!isfinite(options->rate) || options->rate < 0)
        return xd_fail(err, XD_INVALID, 0, "link_open", "rate is %g bytes/s; allowed: 0 (unknown) or above",
                       options->rate);
    return XD_OK;
}

static int open_direct(xd_link *link, xd_error *err)
{
    int enabled;
    int status = xd_runtime_peer_enable(link->runtime, link->src_device, link->dst_device, &enabled, err);
    if (status || enabled)
        return status;
    return xd_fail(err, XD_NO_PEER, 0, "link_open", "no peer access from device %d to device %d: copies must be staged",
                   link->src_device, link->dst_device);
}

static int open_staged(xd_link *link, const xd_link_options *options, xd_error *err)
{
    uint64_t bytes;
    link->tiles = options->tiles ? options->tiles : DEFAULT_TILES;
    link->room = ring_tile(link, options->max_bytes);
    if (__builtin_mul_overflow(link->room, link->tiles, &bytes))
        return xd_fail(err, XD_INVALID, 0, "link_open", "%u tiles of %" PRIu64 " bytes do not fit an address space",
                       link->tiles, link->room);
    int status = xd_stream_open(&link->in, link->runtime, link->dst_device, err);
    if (!status)
        status = xd_event_open(&link->filled, link->runtime, 0, err);
    for (int half = 0; half < 2 && !status; half++)
        status = xd_event_open(&link->freed[half], link->runtime, 0, err);
    if (!status)
        status = xd_buffer_open(&link->ring, link->runtime, XD_HOST, bytes, err);
    return status;
}

static void close_parts(xd_link *link)
{
    xd_buffer_close(&link->ring);
    for (int half = 0; half < 2; half++)
        xd_event_close(&link->freed[half]);
    xd_event_close(&link->filled);
    xd_stream_close(&link->in);
    xd_stream_close(&link->out);
}

int xd_link_open(xd_link **out, xd_runtime *runtime, int src_device, int dst_device, const xd_link_options *options,
                 xd_error *err)
{
    int status = xd_runtime_check_device(runtime, src_device, "link_open", err);
    if (!status)
        status = xd_runtime_check_device(runtime, dst_device, "link_open", err);
    if (!status)
        status = check_options(options, err);
    if (status)
        return status;
    xd_link *link = xd_new(sizeof *link, "link_open", err);
    if (!link)
        return XD_NO_HOST_MEMORY;
    *link = (xd_link){
        .runtime = runtime,
        .src_device = src_device,
        .dst_device = dst_device,
        .path = options->path,
        .direct_from = options->direct_from,
        .direct_to = options->direct_to,
        .tile_bytes = options->tile_bytes,
        .rate = options->rate > 0 ? options->rate : DEFAULT_RATE,
        .gate = options->gate,
    };
    if (src_device != dst_device && link->path != XD_STAGED)
        status = open_direct(link, err);
    if (!status)
        status = xd_stream_open(&link->out, runtime, src_device, err);
    if (!status && can_stage(link))
        status = open_staged(link, options, err);
    if (status) {
        close_parts(link);
        free(link);
        return status;
    }
    pthread_mutex_init(&link->lock, NULL);
    xd_runtime_count(runtime, XD_LIVE_LINKS, 1);
    *out = link;
    return XD_OK;
}

/* Waits until nothing queued here is left: *done is 0 where that took too long. An event of its own, so that it needs
   none of the copies'. */
static int rest(xd_link *link, int *done)
{
    xd_stream *const streams[] = {link->out, link->in};
    xd_event *end;
    int status = xd_event_open(&end, link->runtime, 0, NULL);
    if (status)
        return status;
    *done = 1;
    for (int i = 0; i < 2 && streams[i] && !status && *done; i++) {
        status = xd_event_record(end, streams[i], NULL);
        if (!status)
            status = xd_event_wait(end, XD_PATIENCE, done, NULL);
    }
    xd_event_close(&end);
    return status;
}

/* Is nothing in flight now? Then no half of the ring needs a wait. */
static int is_quiet(xd_link *link)
{
    int done;
    if (rest(link, &done) || !done)
        return 0;
    link->next = 0;
    link->waited = 1;
    return 1;
}

void xd_link_close(xd_link **at)
{
    xd_link *link = at ? *at : NULL;
    if (!link)
        return;
    /* A call may fail once; if it fails again the device has stopped. One that still runs may write to the ring. */
    int done = 1;
    if (rest(link, &done))
        rest(link, &done);
    if (!done && link->ring)
        xd_buffer_abandon(&link->ring);
    close_parts(link);
    pthread_mutex_destroy(&link->lock);
    xd_runtime_count(link->runtime, XD_LIVE_LINKS, -1);
    free(link);
    *at = NULL;
}

/* ---- copies ---- */

static int wait_for(xd_stream *stream, xd_event *event, xd_error *err)
{
    return event ? xd_stream_wait(stream, event, err) : XD_OK;
}

static int record(xd_event *event, xd_stream *stream, xd_error *err)
{
    return event ? xd_event_record(event, stream, err) : XD_OK;
}

static int copy_direct(xd_link *link, const xd_transfer *all, const xd_copy *order, xd_error *err)
{
    int status = wait_for(link->out, order->source_ready, err);
    if (!status && order->dest_free != order->source_ready)
        status = wait_for(link->out, order->dest_free, err);
    if (!status)
        status = xd_stream_transfer(link->out, all, err);
    if (!status)
        status = record(order->released, link->out, err);
    if (!status && order->arrived != order->released)
        status = record(order->arrived, link->out, err);
    return status;
}

/* The ring is handed back by the half: before the first tile of a half, `out` waits for the last upload from that half.
   An event for each tile would cost two driver calls more a tile. */
static unsigned half_of(const xd_link *link, unsigned tile)
{
    return tile >= (link->tiles + 1) / 2;
}

static int begins_half(const xd_link *link, unsigned tile)
{
    return !tile || half_of(link, tile) != half_of(link, tile - 1);
}

static int ends_half(const xd_link *link, unsigned tile)
{
    return tile + 1 == link->tiles || half_of(link, tile) != half_of(link, tile + 1);
}

/* What `out` does next may write the next tile. */
static int await_tile(xd_link *link, xd_error *err)
{
    int status = XD_OK;
    if (begins_half(link, link->next) && !link->waited)
        status = xd_stream_wait(link->out, link->freed[half_of(link, link->next)], err);
    link->waited = !status;
    return status;
}

/* Some rows, packed in the next tile. The download comes first: `in` has time until it is over. `arrived`, for the last
   piece, comes before the event of the half: somebody may be waiting for it. */
static int stage_piece(xd_link *link, const xd_transfer *piece, xd_event *dest_free, xd_event *filled,
                       xd_event *arrived, xd_error *err)
{
    unsigned tile = link->next;
    xd_transfer down = *piece, up = *piece;
    down.dst_device = up.src_device = XD_HOST;
    down.dst = up.src = xd_buffer_address(link->ring) + tile * link->room;
    down.dst_pitch = up.src_pitch = piece->width;

    int status = await_tile(link, err);
    if (!status)
        status = xd_stream_transfer(link->out, &down, err);
    if (!status)
        status = xd_event_record(filled, link->out, err);
    if (!status)
        status = wait_for(link->in, dest_free, err);
    if (!status)
        status = xd_stream_wait(link->in, filled, err);
    if (!status)
        status = xd_stream_transfer(link->in, &up, err);
    if (!status)
        status = record(arrived, link->in, err);
    if (!status && ends_half(link, tile))
        status = xd_event_record(link->freed[half_of(link, tile)], link->in, err);
    link->next = (tile + 1) % link->tiles;
    link->waited = 0;
    return status;
}

/* Whole rows to a tile, as many as fit; rows that no tile holds are cut. `released` is the last tile's `filled`. */
static int stage_pieces(xd_link *link, const xd_transfer *all, const xd_copy *order, xd_event *released, xd_error *err)
{
    uint64_t tile = xd_link_tile(link, all->width * all->height);
    uint64_t room = all->height > 1 ? link->room : tile;
    uint64_t cut = all->width <= room ? all->width : tile;
    uint64_t rows = tile / all->width ? tile / all->width : 1;
    xd_event *dest_free = order->dest_free;
    xd_transfer piece = *all;
    for (uint64_t row = 0; row < all->height; row += piece.height) {
        piece.height = rows < all->height - row ? rows : all->height - row;
        for (uint64_t at = 0; at < all->width; at += piece.width) {
            piece.width = cut < all->width - at ? cut : all->width - at;
            piece.dst = all->dst + row * all->dst_pitch + at;
            piece.src = all->src + row * all->src_pitch + at;
            int last = row + piece.height == all->height && at + piece.width == all->width;
            int status = stage_piece(link, &piece, dest_free, last && released ? released : link->filled,
                                     last ? order->arrived : NULL, err);
            if (status)
                return status;
            dest_free = NULL;
        }
    }
    return XD_OK;
}

/* Where one event is `released` and `arrived`, it is recorded at the very end only. A copy of nothing has no tile that
   would carry source_ready over to `in`. The next copy's first tile is waited for now, while the devices are at it. */
static int copy_staged(xd_link *link, const xd_transfer *all, const xd_copy *order, xd_error *err)
{
    xd_event *released = order->released != order->arrived ? order->released : NULL;
    int status = wait_for(link->out, order->source_ready, err);
    if (!status && all->width) {
        status = stage_pieces(link, all, order, released, err);
        return status ? status : await_tile(link, err);
    }
    if (!status)
        status = wait_for(link->in, order->dest_free, err);
    if (!status && order->source_ready != order->dest_free)
        status = wait_for(link->in, order->source_ready, err);
    if (!status)
        status = record(released, link->out, err);
    if (!status)
        status = record(order->arrived, link->in, err);
    return status;
}

static int check_events(const xd_link *link, const xd_copy *copy, xd_error *err)
{
    const xd_event *const events[] = {copy->source_ready, copy->dest_free, copy->released, copy->arrived};
    for (size_t i = 0; i < sizeof events / sizeof events[0]; i++) {
        int status = events[i] ? xd_runtime_check_same(link->runtime, events[i]->runtime, "link_copy", err) : XD_OK;
        if (status)
            return status;
    }
    return XD_OK;
}

int xd_link_copy(xd_link *link, const xd_copy *copy, xd_error *err)
{
    xd_transfer all = {
        .dst_device = link->dst_device,
        .src_device = link->src_device,
        .dst = copy->dst,
        .src = copy->src,
        .width = copy->width,
        .height = copy->height,
        .dst_pitch = copy->dst_pitch,
        .src_pitch = copy->src_pitch,
    };
    int status = xd_runtime_enter(link->runtime, "link_copy", err);
    if (!status)
        status = check_events(link, copy, err);
    if (!status)
        status = xd_stream_check_transfer(&all, err);
    if (status)
        return status;
    xd_copy order = *copy;
    if (!link->gate)
        order.dest_free = NULL;

    pthread_mutex_lock(&link->lock);
    if (link->broken)
        status = xd_fail(err, XD_DEVICE_FAULT, 0, "link_copy",
                         "the link from device %d to device %d is broken: an earlier copy failed half way",
                         link->src_device, link->dst_device);
    else if (is_staged(link, all.width * all.height))
        status = copy_staged(link, &all, &order, err);
    else
        status = copy_direct(link, &all, &order, err);
    if (status && !link->broken)
        link->broken = !is_quiet(link);
    pthread_mutex_unlock(&link->lock);
    return status;
}

int xd_link_drain(xd_link *link, xd_error *err)
{
    int status = xd_runtime_enter(link->runtime, "link_drain", err);
    if (status)
        return status;
    pthread_mutex_lock(&link->lock);
    if (!link->broken)
        link->broken = !is_quiet(link);
    if (link->broken)
        status = xd_fail(err, XD_DEVICE_FAULT, 0, "link_drain", "copies from device %d to device %d do not end",
                         link->src_device, link->dst_device);
    pthread_mutex_unlock(&link->lock);
    return status;
}
