/* The ring: turns, waits by the host and by a stream, time-outs, tiles given back, lost, and shared by threads. */
#include <sched.h>

#include "check.h"
#include "recorder.h"

enum { FOR_EVER_PENDING = 1 << 30 };

static xd_error err;
static recorder rec;
static xd_driver *fault;
static xd_runtime *runtime;
static xd_stream *streams[2];
static xd_ring *ring;

static void begin(unsigned tiles)
{
    recorder_open(&rec, 2);
    OK(xd_fault_create(&fault, &rec.table, &err));
    OK(xd_runtime_open(&runtime, fault, NULL, &err));
    for (int device = 0; device < 2; device++)
        OK(xd_stream_open(&streams[device], runtime, device, &err));
    OK(xd_ring_open(&ring, runtime, tiles, 100, &err));
}

static void end(void)
{
    xd_ring_close(&ring);
    xd_ring_close(&ring);
    xd_ring_close(NULL);
    xd_stream_close(&streams[0]);
    xd_stream_close(&streams[1]);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
}

static xd_tile acquire(void)
{
    xd_tile tile;
    int got = 0;
    OK(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err));
    CHECK_EQ(got, 1);
    CHECK_EQ(tile.bytes, 100);
    return tile;
}

static void turns(void)
{
    begin(3);
    CHECK_EQ(xd_ring_tiles(ring), 3);
    CHECK_EQ(xd_ring_tile_bytes(ring), 100);
    char *base = NULL;
    for (unsigned i = 0; i < 7; i++) {
        xd_tile tile = acquire();
        base = base ? base : tile.address;
        CHECK_EQ(tile.index, i % 3);
        CHECK(tile.address == base + 100 * tile.index);
        CHECK_EQ(rec.queries, i < 3 ? 0 : i - 2); /* a tile never used is not waited for */
        OK(xd_ring_submit(ring, &tile, streams[i % 2], &err));
    }
    OK(xd_ring_drain(ring, &err));
    CHECK_EQ(rec.queries, 4 + 3);
    end();
}

/* Where no driver gives it, it is the C library's; none of it counts as page-locked. */
static void pageable(void)
{
    begin(2);
    xd_ring_close(&ring);
    xd_fault_arm(fault, 1, 1, XD_NO_PINNED_MEMORY);
    FAILS(xd_ring_open(&ring, runtime, 3, 5000, &err), XD_NO_PINNED_MEMORY);
    OK(xd_ring_open_pageable(&ring, runtime, 3, 5000, &err));
    xd_fault_arm(fault, 0, 0, 0);
    CHECK(xd_ring_is_pageable(ring));
    xd_live live;
    xd_runtime_live(runtime, &live);
    CHECK_EQ(live.pinned_bytes, 0);
    CHECK_EQ(live.buffers, 1);
    for (unsigned i = 0; i < 4; i++) {
        xd_tile tile;
        int got = 0;
        OK(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err));
        CHECK(got && tile.index == i % 3);
        CHECK_EQ((uintptr_t)tile.address % 4096, i % 3 * 5000 % 4096);
        memset(tile.address, 1, tile.bytes);
        OK(xd_ring_submit(ring, &tile, streams[0], &err));
    }
    CHECK_EQ(rec.queries, 1);
    end();
}

static void handed_back(void)
{
    begin(2);
    xd_tile tile = acquire();
    OK(xd_ring_submit(ring, &tile, streams[1], &err));
    tile = acquire();
    CHECK_EQ(tile.index, 1);
    xd_ring_release(ring, &tile);
    tile = acquire();
    CHECK_EQ(tile.index, 0);
    CHECK_EQ(rec.queries, 1);
    xd_ring_release(ring, &tile);
    tile = acquire();
    CHECK_EQ(tile.index, 1);
    FAILS(xd_ring_submit(ring, &(xd_tile){.index = 0}, streams[0], &err), XD_INVALID);
    CHECK_HAS(err.text, "tile 0 is not held");
    FAILS(xd_ring_submit(ring, &(xd_tile){.index = 2}, streams[0], &err), XD_INVALID);
    xd_ring_release(ring, &tile);
    CHECK_TEXT(rec.log, "s1 record e0\n");
    end();
}

static void time_outs(void)
{
    begin(2);
    xd_tile first = acquire(), tile;
    int got = 1;
    OK(xd_ring_submit(ring, &first, streams[0], &err));
    tile = acquire();
    OK(xd_ring_submit(ring, &tile, streams[0], &err));
    rec.pending = FOR_EVER_PENDING; /* in flight */
    OK(xd_ring_acquire(ring, 0, &tile, &got, &err));
    CHECK_EQ(got, 0);
    got = 1;
    OK(xd_ring_acquire(ring, 100000, &tile, &got, &err));
    CHECK_EQ(got, 0);
    rec.pending = 0;
    tile = acquire(); /* a turn that timed out comes again */
    CHECK_EQ(tile.index, 0);
    first = acquire();
    got = 1;
    OK(xd_ring_acquire(ring, 100000, &tile, &got, &err)); /* held */
    CHECK_EQ(got, 0);
    xd_ring_release(ring, &(xd_tile){.index = 0});
    tile = acquire();
    CHECK_EQ(tile.index, 0);
    xd_ring_release(ring, &tile);
    xd_ring_release(ring, &first);
    end();
}

static void errors(void)
{
    begin(2);
    xd_tile tile = acquire();
    int got = 7;
    OK(xd_ring_submit(ring, &tile, streams[0], &err));
    tile = acquire();
    OK(xd_ring_submit(ring, &tile, streams[0], &err));
    rec.query_status = XD_DEVICE_FAULT;
    FAILS(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err), XD_DEVICE_FAULT);
    CHECK_EQ(got, 7);
    FAILS(xd_ring_drain(ring, &err), XD_DEVICE_FAULT);
    rec.query_status = 0;
    tile = acquire();
    CHECK_EQ(tile.index, 0);

    xd_fault_arm(fault, 1, 0, XD_DRIVER); /* the record fails once: the next attempt tells when the tile is free */
    FAILS(xd_ring_submit(ring, &tile, streams[0], &err), XD_DRIVER);
    CHECK_EQ(xd_fault_calls(fault), 2);
    xd_fault_arm(fault, 0, 0, 0);
    tile = acquire();
    CHECK_EQ(tile.index, 1);
    OK(xd_ring_submit(ring, &tile, streams[0], &err));
    rec.queries = 0;
    tile = acquire();
    CHECK_EQ(tile.index, 0);
    CHECK_EQ(rec.queries, 1);

    xd_fault_arm(fault, 1, 1, XD_DRIVER); /* for good: nobody may have the tile again */
    FAILS(xd_ring_submit(ring, &tile, streams[0], &err), XD_DRIVER);
    xd_fault_arm(fault, 0, 0, 0);
    tile = acquire();
    CHECK_EQ(tile.index, 1);
    xd_ring_release(ring, &tile);
    FAILS(xd_ring_acquire(ring, XD_FOREVER, &tile, &got, &err), XD_DEVICE_FAULT);
    CHECK_HAS(err.text, "tile 0 is lost");
    FAILS(xd_ring_drain(ring, &err), XD_DEVICE_FAULT);
    end();
}

static void refused(void)
{
    begin(1);
    xd_ring *none = NULL;
    FAILS(xd_ring_open(&none, runtime, 0, 10, &err), XD_INVALID);
    CHECK_HAS(err.text, "0 tiles of 10 bytes");
    FAILS(xd_ring_open(&none, runtime, 1, 0, &err), XD_INVALID);
    FAILS(xd_ring_open(&none, runtime, 4, UINT64_MAX / 2, &err), XD_INVALID);
    CHECK(!none);
    end();
}

enum { TILES = 3, WORKERS = 4, ROUNDS = 500 };
static atomic_int owners[TILES], handed_out;

/* No tile has two holders; some turns are given up, some tiles given back unused. */
static void *work(void *arg)
{
    int me = (int)(intptr_t)arg;
    xd_error err;
    for (int i = 0; i < ROUNDS;) {
        xd_tile tile;
        int got;
        OK(xd_ring_acquire(ring, i % 5 ? XD_FOREVER : 1000, &tile, &got, &err));
        if (!got)
            continue;
        int nobody = 0;
        CHECK(atomic_compare_exchange_strong(&owners[tile.index], &nobody, me));
        memset(tile.address, me, tile.bytes);
        sched_yield();
        for (uint64_t k = 0; k < tile.bytes; k++)
            CHECK_EQ(((unsigned char *)tile.address)[k], me);
        owners[tile.index] = 0;
        if (i % 7)
            OK(xd_ring_submit(ring, &tile, streams[me % 2], &err));
        else
            xd_ring_release(ring, &tile);
        handed_out++;
        i++;
    }
    return NULL;
}

static void threads(void)
{
    pthread_t workers[WORKERS];
    begin(TILES);
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_create(&workers[i], NULL, work, (void *)(intptr_t)(i + 1)), 0);
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_join(workers[i], NULL), 0);
    CHECK_EQ(handed_out, WORKERS * ROUNDS);
    OK(xd_ring_drain(ring, &err));
    end();
}

int main(void)
{
    turns();
    pageable();
    handed_back();
    time_outs();
    errors();
    refused();
    threads();
    return 0;
}
