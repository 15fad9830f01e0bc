/* Tile sizes: equal, about sqrt(6.5 us x rate x bytes), multiples of 4 KiB, at most 8 MiB; and what is pinned for them.
   The memory of a ring is never touched here: 32 MiB of it cost nothing. */
#include "check.h"
#include "recorder.h"

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)

static xd_error err;
static recorder rec;
static xd_runtime *runtime;

static xd_link *open_link(xd_link_options options)
{
    xd_link *link;
    options.path = options.path ? options.path : XD_STAGED;
    OK(xd_link_open(&link, runtime, 0, 1, &options, &err));
    return link;
}

static void fitted(void)
{
    static const struct { uint64_t bytes, tiles; } table[] = {
        {4 * KIB, 1},  {64 * KIB, 1}, {256 * KIB, 1}, {1 * MIB, 2},   {4 * MIB, 4},
        {12 * MIB, 6}, {64 * MIB, 14}, {256 * MIB, 32}, {1024 * MIB, 128},
    };
    xd_link *link = open_link((xd_link_options){0});
    CHECK_EQ(xd_link_pinned_bytes(link), 4 * 8 * MIB);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        uint64_t bytes = table[i].bytes, tile = xd_link_tile(link, bytes);
        CHECK_EQ(tile % (4 * KIB), 0);
        CHECK_EQ((bytes + tile - 1) / tile, table[i].tiles);
    }
    uint64_t before = 0;
    for (uint64_t bytes = 0; bytes < 4096 * MIB; bytes += bytes / 3 + 1000) {
        uint64_t tile = xd_link_tile(link, bytes), count = (bytes + tile - 1) / tile;
        CHECK(tile >= 4 * KIB && tile <= 8 * MIB && tile % (4 * KIB) == 0);
        CHECK(count * tile - bytes < tile + 4 * KIB * count); /* equal tiles: the last one is no stump */
        before = tile > before ? tile : before;
    }
    CHECK_EQ(before, 8 * MIB);
    CHECK_EQ(xd_link_tile(link, UINT64_MAX), 8 * MIB);
    xd_link_close(&link);
}

static void bounded(void)
{
    xd_link *link = open_link((xd_link_options){.max_bytes = 1 * MIB});
    uint64_t tile = xd_link_tile(link, 1 * MIB);
    CHECK_EQ(xd_link_pinned_bytes(link), 4 * tile);
    CHECK_EQ(xd_link_tile(link, 1024 * MIB), tile); /* larger copies than expected make do */
    xd_link_close(&link);

    link = open_link((xd_link_options){.max_bytes = 1, .tiles = 2});
    CHECK_EQ(xd_link_pinned_bytes(link), 2 * 4 * KIB);
    xd_link_close(&link);

    link = open_link((xd_link_options){.tile_bytes = 1 * MIB, .max_bytes = 10 * KIB, .tiles = 3});
    CHECK_EQ(xd_link_pinned_bytes(link), 3 * 12 * KIB);
    xd_link_close(&link);

    link = open_link((xd_link_options){.tile_bytes = 1, .tiles = 1});
    CHECK_EQ(xd_link_pinned_bytes(link), 1);
    CHECK_EQ(xd_link_tile(link, 100), 1);
    xd_link_close(&link);

    link = open_link((xd_link_options){.path = XD_BY_SIZE, .direct_from = 1});
    CHECK_EQ(xd_link_pinned_bytes(link), 4 * 4 * KIB);
    xd_link_close(&link);

    link = open_link((xd_link_options){.path = XD_BY_SIZE, .direct_from = 64 * KIB, .max_bytes = 64 * MIB});
    CHECK_EQ(xd_link_pinned_bytes(link), 4 * 64 * KIB);
    xd_link_close(&link);
}

/* A tile grows with the square root of the rate too. */
static void rates(void)
{
    xd_link *slow = open_link((xd_link_options){.rate = 1e9});
    xd_link *fast = open_link((xd_link_options){.rate = 16e9});
    CHECK_EQ(xd_link_tile(slow, 4 * MIB) / (36 * KIB), 4);
    CHECK(xd_link_tile(fast, 4 * MIB) > 3 * xd_link_tile(slow, 4 * MIB));
    xd_link_close(&slow);
    xd_link_close(&fast);
    xd_link *crawl = open_link((xd_link_options){.rate = 1e-300});
    CHECK_EQ(xd_link_tile(crawl, 4 * MIB), 4 * KIB);
    xd_link_close(&crawl);
}

int main(void)
{
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    fitted();
    bounded();
    rates();
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
    return 0;
}
