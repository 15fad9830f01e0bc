/* Tiles of host memory, handed out in turn, each with the event after which it may be written again. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>

typedef struct ring_tile {
    xd_event *free; /* never recorded: the tile was never used */
    uint64_t uses;  /* tells one wait for `free` from the next */
    int held;       /* by whoever acquired it */
    int lost;       /* the status with which its event could not be recorded */
} ring_tile;

struct xd_ring {
    xd_runtime *runtime;
    pthread_mutex_t lock;
    pthread_cond_t handed_back;
    xd_buffer *memory;
    uint64_t tile_bytes;
    unsigned count;
    int pageable;
    uint64_t turns; /* given out; turn i is for tile i % count */
    ring_tile tiles[];
};

static int open_ring(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, int pageable,
                     xd_error *err)
{
    int status = xd_runtime_enter(runtime, "ring_open", err);
    if (status)
        return status;
    uint64_t bytes;
    if (!tiles || !tile_bytes || __builtin_mul_overflow(tile_bytes, tiles, &bytes))
        return xd_fail(err, XD_INVALID, 0, "ring_open",
                       "%u tiles of %" PRIu64 " bytes; allowed: one tile of one byte or more", tiles, tile_bytes);
    xd_ring *ring = xd_new(sizeof *ring + tiles * sizeof ring->tiles[0], "ring_open", err);
    if (!ring)
        return XD_NO_HOST_MEMORY;
    ring->runtime = runtime;
    ring->tile_bytes = tile_bytes;
    ring->pageable = pageable;
    for (; ring->count < tiles; ring->count++) {
        status = xd_event_open(&ring->tiles[ring->count].free, runtime, 0, err);
        if (status)
            goto close_events;
    }
    status = pageable ? xd_buffer_open_pageable(&ring->memory, runtime, bytes, err)
                      : xd_buffer_open(&ring->memory, runtime, XD_HOST, bytes, err);
    if (status)
        goto close_events;
    pthread_mutex_init(&ring->lock, NULL);
    xd_condition_open(&ring->handed_back);
    xd_runtime_count(runtime, XD_LIVE_RINGS, 1);
    *out = ring;
    return XD_OK;

close_events:
    while (ring->count)
        xd_event_close(&ring->tiles[--ring->count].free);
    free(ring);
    return status;
}

int xd_ring_open(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err)
{
    return open_ring(out, runtime, tiles, tile_bytes, 0, err);
}

int xd_ring_open_pageable(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err)
{
    return open_ring(out, runtime, tiles, tile_bytes, 1, err);
}

/* Can no queued work touch a tile any more? An error means that the device has stopped. */
static int is_quiet(xd_ring *ring)
{
    uint64_t when = xd_later(xd_runtime_clock(ring->runtime), XD_PATIENCE);
    for (unsigned i = 0; i < ring->count; i++) {
        int done = 0;
        uint64_t left = xd_remaining(xd_runtime_clock(ring->runtime), when);
        if (xd_event_wait(ring->tiles[i].free, left, &done, NULL) == XD_OK && !done)
            return 0;
    }
    return 1;
}

void xd_ring_close(xd_ring **at)
{
    xd_ring *ring = at ? *at : NULL;
    if (!ring)
        return;
    if (is_quiet(ring))
        xd_buffer_close(&ring->memory);
    else
        xd_buffer_abandon(&ring->memory);
    for (unsigned i = 0; i < ring->count; i++)
        xd_event_close(&ring->tiles[i].free);
    pthread_cond_destroy(&ring->handed_back);
    pthread_mutex_destroy(&ring->lock);
    xd_runtime_count(ring->runtime, XD_LIVE_RINGS, -1);
    free(ring);
    *at = NULL;
}

const xd_runtime *xd_ring_runtime(const xd_ring *ring)
{
    return ring->runtime;
}

unsigned xd_ring_tiles(const xd_ring *ring)
{
    return ring->count;
}

int xd_ring_is_pageable(const xd_ring *ring)
{
    return ring->pageable;
}

uint64_t xd_ring_tile_bytes(const xd_ring *ring)
{
    return ring->tile_bytes;
}

/* ---- taking a tile; under the lock ---- */

static int check_lost(const xd_ring *ring, unsigned index, xd_error *err)
{
    int status = ring->tiles[index].lost;
    if (!status)
        return XD_OK;
    return xd_fail(err, XD_DEVICE_FAULT, 0, "ring_acquire",
                   "tile %u is lost: its last use could not be recorded (%s)", index, xd_status_text(status));
}

static void take(xd_ring *ring, unsigned index, xd_tile *out)
{
    ring->tiles[index].held = 1;
    uint64_t address = xd_buffer_address(ring->memory) + index * ring->tile_bytes;
    *out = (xd_tile){.address = (void *)(uintptr_t)address, .bytes = ring->tile_bytes, .index = index};
}

static void hand_back(xd_ring *ring, unsigned index)
{
    ring->tiles[index].held = 0;
    pthread_cond_broadcast(&ring->handed_back);
}

/* A turn that came to nothing; once others have taken later ones it is lost, and its tile is passed over once. */
static void undo_turn(xd_ring *ring, uint64_t turn)
{
    if (ring->turns == turn + 1)
        ring->turns = turn;
}

/* ---- acquire ---- */

/* Each caller waits for the tile of its own turn, so that one slow device does not hold up everybody. */
int xd_ring_acquire(xd_ring *ring, uint64_t timeout, xd_tile *out, int *got, xd_error *err)
{
    int status = xd_runtime_enter(ring->runtime, "ring_acquire", err);
    if (status)
        return status;
    uint64_t held_until = xd_later(xd_monotonic(), timeout);
    uint64_t until = xd_later(xd_runtime_clock(ring->runtime), timeout);
    int taken = 0;

    pthread_mutex_lock(&ring->lock);
    uint64_t turn = ring->turns++;
    unsigned index = (unsigned)(turn % ring->count);
    ring_tile *mine = &ring->tiles[index];
    while (!taken) {
        status = check_lost(ring, index, err);
        if (status)
            break;
        if (mine->held) {
            if (!xd_condition_wait(&ring->handed_back, &ring->lock, held_until))
                break;
            continue;
        }
        uint64_t uses = mine->uses;
        int done;
        pthread_mutex_unlock(&ring->lock);
        uint64_t left = xd_remaining(xd_runtime_clock(ring->runtime), until);
        status = xd_event_wait(mine->free, left, &done, err);
        pthread_mutex_lock(&ring->lock);
        if (status || !done)
            break;
        if (!mine->held && mine->uses == uses) {
            take(ring, index, out);
            taken = 1;
        }
    }
    if (!taken)
        undo_turn(ring, turn);
    pthread_mutex_unlock(&ring->lock);
    if (!status)
        *got = taken;
    return status;
}

/* ---- giving it back ---- */

static int is_held(xd_ring *ring, unsigned index)
{
    pthread_mutex_lock(&ring->lock);
    int held = index < ring->count && ring->tiles[index].held;
    pthread_mutex_unlock(&ring->lock);
    return held;
}

int xd_ring_submit(xd_ring *ring, const xd_tile *tile, xd_stream *reader, xd_error *err)
{
    int status = xd_runtime_enter(ring->runtime, "ring_submit", err);
    if (!status)
        status = xd_runtime_check_same(ring->runtime, reader->runtime, "ring_submit", err);
    if (status)
        return status;
    if (!is_held(ring, tile->index))
        return xd_fail(err, XD_INVALID, 0, "ring_submit", "tile %u is not held: submit what was acquired, once",
                       tile->index);
    ring_tile *mine = &ring->tiles[tile->index];
    status = xd_event_record(mine->free, reader, err);
    /* The reader may be on its way already. Without an event nobody would know when it is done, so ask once more; if
       that fails too, the tile is never handed out again. */
    int lost = status ? xd_event_record(mine->free, reader, NULL) : XD_OK;
    pthread_mutex_lock(&ring->lock);
    mine->uses++;
    mine->lost = lost;
    hand_back(ring, tile->index);
    pthread_mutex_unlock(&ring->lock);
    return status;
}

void xd_ring_release(xd_ring *ring, const xd_tile *tile)
{
    if (tile->index >= ring->count || !xd_runtime_owned(ring->runtime))
        return;
    pthread_mutex_lock(&ring->lock);
    hand_back(ring, tile->index);
    pthread_mutex_unlock(&ring->lock);
}

int xd_ring_drain(xd_ring *ring, xd_error *err)
{
    for (unsigned i = 0; i < ring->count; i++) {
        pthread_mutex_lock(&ring->lock);
        int status = check_lost(ring, i, err);
        pthread_mutex_unlock(&ring->lock);
        int done;
        if (!status)
            status = xd_event_wait(ring->tiles[i].free, XD_FOREVER, &done, err);
        if (status)
            return status;
    }
    return XD_OK;
}
