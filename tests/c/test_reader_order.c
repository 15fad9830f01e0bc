/* The reader on simulated devices that do everything as late and as early as they may: a wait that is missing shows in
   the bytes within a few seeds. Arguments: the first seed and how many (1, 4). */
#include "check.h"
#include "machine.h"

#include <unistd.h>

enum { BYTES = 60000, TILE = 4096, KEPT_TILE = 4 << 20, DEVICES = 2 };

static xd_error err;
static xd_runtime *runtime;
static unsigned char content[DEVICES][BYTES];
static int files[DEVICES];
static unsigned long long seed;
static const char *scene;

static void make_files(void)
{
    for (int i = 0; i < DEVICES; i++) {
        char name[] = "/var/tmp/xdev-order-XXXXXX";
        files[i] = mkstemp(name);
        CHECK(files[i] >= 0);
        unlink(name);
        for (int at = 0; at < BYTES; at++)
            content[i][at] = (unsigned char)(at * 131 + (at >> 8) + 77 * i);
        CHECK_EQ(write(files[i], content[i], BYTES), BYTES);
    }
}

static void wrong(const char *what)
{
    fprintf(stderr, "seed %llu: %s: %s is wrong\n", seed, scene, what);
    exit(1);
}

static void run(const char *name, xd_reader_options options)
{
    xd_reader *reader;
    xd_buffer *memory[DEVICES];
    xd_piece pieces[DEVICES];
    scene = name;
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    for (int i = 0; i < DEVICES; i++) {
        OK(xd_buffer_open(&memory[i], runtime, i, BYTES, &err));
        pieces[i] = (xd_piece){.fd = files[i], .direct_fd = -1, .device = i, .bytes = BYTES,
                               .address = xd_buffer_address(memory[i])};
        memset((void *)(uintptr_t)pieces[i].address, 0xA5, BYTES);
    }
    options.tiles = 3;
    options.tile_bytes = TILE;
    options.workers = 1;
    OK(xd_reader_open(&reader, runtime, pieces, DEVICES, &options, &err));
    OK(xd_reader_run(reader, &err));
    if (options.verify && xd_reader_verify(reader, &err))
        wrong("a checksum");
    for (int i = 0; i < DEVICES; i++)
        if (memcmp((void *)(uintptr_t)pieces[i].address, content[i], BYTES) != 0)
            wrong("a byte");
    xd_reader_close(&reader);
    for (int i = 0; i < DEVICES; i++)
        xd_buffer_close(&memory[i]);
    OK(xd_runtime_close(&runtime, &err));
}

/* A reader that fails ends when nothing of it is on its way any more, although its page-locked memory is kept. */
static void run_into_the_end(void)
{
    scene = "a file that ends early";
    xd_reader *reader;
    xd_buffer *memory;
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    OK(xd_buffer_open(&memory, runtime, 0, 2 * BYTES, &err));
    uint64_t address = xd_buffer_address(memory);
    xd_piece pieces[] = {
        {.fd = files[0], .direct_fd = -1, .bytes = TILE, .address = address},
        {.fd = files[0], .direct_fd = -1, .offset = BYTES - 1, .bytes = TILE, .address = address + BYTES},
    };
    memset((void *)(uintptr_t)address, 0xA5, TILE);
    xd_reader_options options = {.tiles = 2, .tile_bytes = KEPT_TILE, .workers = 1};
    OK(xd_reader_open(&reader, runtime, pieces, 2, &options, &err));
    FAILS(xd_reader_run(reader, &err), XD_TRUNCATED);
    xd_reader_close(&reader);
    if (memcmp((void *)(uintptr_t)address, content[0], TILE) != 0)
        wrong("a byte");
    xd_buffer_close(&memory);
    OK(xd_runtime_close(&runtime, &err));
}

int main(int argc, char **argv)
{
    unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned long long count = argc > 2 ? strtoull(argv[2], NULL, 10) : 4;
    make_files();
    for (seed = first; seed < first + count; seed++) {
        run("asynchronous uploads", (xd_reader_options){0});
        run("uploads that are waited for", (xd_reader_options){.sync_uploads = 1});
        run("reading back", (xd_reader_options){.verify = 1});
        run_into_the_end();
    }
    for (int i = 0; i < DEVICES; i++)
        close(files[i]);
    return 0;
}
