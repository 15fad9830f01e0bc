/* The reader on simulated devices that do everything as late and as early as they may: a wait that is missing shows in
   the bytes within a few seeds. Arguments: the first seed and how many (1, 4). */
#include "check.h"
#include "machine.h"

#include <unistd.h>

enum { BYTES = 60000, TILE = 4096, KEPT_TILE = 4 << 20, DEVICES = 2 };
enum { SYNC = 1, DRAIN = 2, VERIFY = 4 };

static xd_error err;
static xd_runtime *runtime;
static unsigned char content[DEVICES][BYTES];
static int files[DEVICES];
static unsigned long long seed;
static const char *scene;

typedef struct load {
    xd_reader *reader;
    xd_buffer *memory[DEVICES];
    int shift; /* device i gets file i + shift */
} load;

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

static load start(int how, int shift, xd_reader_options options)
{
    load made = {.shift = shift};
    xd_piece pieces[DEVICES];
    for (int i = 0; i < DEVICES; i++) {
        OK(xd_buffer_open(&made.memory[i], runtime, i, BYTES, &err));
        pieces[i] = (xd_piece){.fd = files[(i + shift) % DEVICES], .direct_fd = -1, .device = i, .bytes = BYTES,
                               .address = xd_buffer_address(made.memory[i])};
        memset((void *)(uintptr_t)pieces[i].address, 0xA5, BYTES);
    }
    options.workers = 1;
    options.sync_uploads = how & SYNC;
    options.verify = how & VERIFY;
    OK(xd_reader_open(&made.reader, runtime, pieces, DEVICES, &options, &err));
    OK(xd_reader_run(made.reader, &err));
    if (how & DRAIN)
        OK(xd_reader_drain(made.reader, &err));
    if (how & VERIFY && xd_reader_verify(made.reader, &err))
        wrong("a checksum");
    return made;
}

static void check(const load *made)
{
    for (int i = 0; i < DEVICES; i++) {
        const void *there = (const void *)(uintptr_t)xd_buffer_address(made->memory[i]);
        if (memcmp(there, content[(i + made->shift) % DEVICES], BYTES) != 0)
            wrong("a byte");
    }
}

static void end(load *made)
{
    xd_reader_close(&made->reader);
    for (int i = 0; i < DEVICES; i++)
        xd_buffer_close(&made->memory[i]);
}

static void run(const char *name, int how)
{
    scene = name;
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    load made = start(how, 0, (xd_reader_options){.tiles = 3, .tile_bytes = TILE});
    check(&made);
    end(&made);
    OK(xd_runtime_close(&runtime, &err));
}

/* The page-locked memory of a reader that was closed is kept for the next one, which must not come too early. */
static void run_one_after_the_other(void)
{
    scene = "one reader after the other";
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    xd_reader_options options = {.tiles = 2, .tile_bytes = KEPT_TILE};
    load first = start(0, 0, options);
    xd_reader_close(&first.reader);
    load second = start(DRAIN, 1, options);
    check(&first);
    check(&second);
    end(&first);
    end(&second);
    OK(xd_runtime_close(&runtime, &err));
}

int main(int argc, char **argv)
{
    unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned long long count = argc > 2 ? strtoull(argv[2], NULL, 10) : 4;
    make_files();
    for (seed = first; seed < first + count; seed++) {
        run("asynchronous uploads", DRAIN);
        run("uploads that are waited for", SYNC);
        run("reading back", DRAIN | VERIFY);
        run_one_after_the_other();
    }
    for (int i = 0; i < DEVICES; i++)
        close(files[i]);
    return 0;
}
