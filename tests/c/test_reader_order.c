/* The reader on simulated devices that do everything as late and as early as they may: a wait that is missing shows in
   the bytes within a few seeds. Arguments: the first seed and how many (1, 4). */
#include "check.h"
#include "machine.h"

#include <unistd.h>

enum { BYTES = 60000, TILE = 4096, DEVICES = 2 };

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

static void run(int sync, int drain, int verify)
{
    xd_reader *reader;
    xd_buffer *memory[DEVICES];
    xd_piece pieces[DEVICES];
    OK(xd_runtime_open(&runtime, machine_jumbled(DEVICES, seed), NULL, &err));
    for (int i = 0; i < DEVICES; i++) {
        OK(xd_buffer_open(&memory[i], runtime, i, BYTES, &err));
        pieces[i] = (xd_piece){.fd = files[i], .direct_fd = -1, .device = i, .bytes = BYTES,
                               .address = xd_buffer_address(memory[i])};
        memset((void *)(uintptr_t)pieces[i].address, 0xA5, BYTES);
    }
    xd_reader_options options = {.tiles = 3, .tile_bytes = TILE, .sync_uploads = sync, .verify = verify};
    OK(xd_reader_open(&reader, runtime, pieces, DEVICES, &options, &err));
    OK(xd_reader_run(reader, &err));
    if (drain)
        OK(xd_reader_drain(reader, &err));
    if (verify && xd_reader_verify(reader, &err))
        wrong("a checksum");
    for (int i = 0; i < DEVICES; i++)
        if (memcmp((void *)(uintptr_t)pieces[i].address, content[i], BYTES) != 0)
            wrong("a byte");
    xd_reader_close(&reader);
    for (int i = 0; i < DEVICES; i++)
        xd_buffer_close(&memory[i]);
    OK(xd_runtime_close(&runtime, &err));
}

int main(int argc, char **argv)
{
    unsigned long long first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    unsigned long long count = argc > 2 ? strtoull(argv[2], NULL, 10) : 4;
    make_files();
    for (seed = first; seed < first + count; seed++) {
        scene = "asynchronous uploads";
        run(0, 1, 0);
        scene = "uploads that are waited for";
        run(1, 0, 0);
        scene = "reading back";
        run(0, 1, 1);
    }
    for (int i = 0; i < DEVICES; i++)
        close(files[i]);
    return 0;
}
