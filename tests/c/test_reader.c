/* The reader: which pieces share a tile and an upload, what is read how, and how it ends. */
#include "check.h"
#include "recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE UINT64_C(4096)

enum { FILE_BYTES = 200000 };

static xd_error err;
static recorder rec;
static xd_runtime *runtime;
static unsigned char content[FILE_BYTES];
static int plain, other, direct;

/* Two names of one file, so that two descriptors stand for two files, and one for direct I/O where that works. */
static void make_file(void)
{
    char name[] = "/var/tmp/xdev-reader-XXXXXX";
    plain = mkstemp(name);
    CHECK(plain >= 0);
    for (int i = 0; i < FILE_BYTES; i++)
        content[i] = (unsigned char)(i * 131 + (i >> 8));
    CHECK_EQ(write(plain, content, FILE_BYTES), FILE_BYTES);
    CHECK_EQ(fsync(plain), 0);
    other = open(name, O_RDONLY | O_CLOEXEC);
    direct = open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (direct < 0)
        direct = open(name, O_RDONLY | O_CLOEXEC);
    CHECK(other >= 0 && direct >= 0);
    unlink(name);
}

typedef struct target {
    xd_buffer *buffer;
    uint64_t address;
} target;

static target on_device(int device, uint64_t bytes)
{
    target made;
    OK(xd_buffer_open(&made.buffer, runtime, device, bytes, &err));
    made.address = xd_buffer_address(made.buffer);
    memset((void *)(uintptr_t)made.address, 0xA5, bytes);
    recorder_clear(&rec);
    return made;
}

static void check_bytes(uint64_t address, uint64_t offset, uint64_t bytes)
{
    CHECK(memcmp((void *)(uintptr_t)address, content + offset, bytes) == 0);
}

static xd_reader *open_reader(const xd_piece *pieces, size_t count, xd_reader_options options)
{
    xd_reader *reader;
    options.tiles = options.tiles ? options.tiles : 2;
    options.tile_bytes = options.tile_bytes ? options.tile_bytes : 2 * PAGE;
    OK(xd_reader_open(&reader, runtime, pieces, count, &options, &err));
    return reader;
}

static xd_progress progress(const xd_reader *reader, int device)
{
    xd_progress found;
    CHECK(xd_reader_progress(reader, device, &found));
    return found;
}

static void run(const xd_piece *pieces, size_t count, xd_reader_options options)
{
    xd_reader *reader = open_reader(pieces, count, options);
    OK(xd_reader_run(reader, &err));
    uint64_t wanted = 0, done = 0;
    for (size_t i = 0; i < count; i++) {
        wanted += pieces[i].bytes;
        check_bytes(pieces[i].address, pieces[i].offset, pieces[i].bytes);
    }
    for (int device = 0; device < 2; device++)
        done += progress(reader, device).done;
    CHECK_EQ(done, wanted);
    CHECK_EQ(xd_reader_failed(reader), -1);
    xd_reader_close(&reader);
    CHECK(!reader);
}

static int uploads(void)
{
    int count = 0;
    for (const char *at = rec.log; (at = strstr(at, " copy ")); at++)
        count++;
    return count;
}

/* ---- what shares an upload ---- */

static void cuts(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece one = {.fd = plain, .direct_fd = -1, .offset = 100, .bytes = 3 * 2 * PAGE + 5, .address = to.address};
    run(&one, 1, (xd_reader_options){0});
    CHECK_EQ(uploads(), 4);
    one.bytes = 2 * PAGE;
    recorder_clear(&rec);
    run(&one, 1, (xd_reader_options){0});
    CHECK_EQ(uploads(), 1);
    xd_buffer_close(&to.buffer);
}

static void neighbours(void)
{
    target to = on_device(0, FILE_BYTES);
    struct { uint64_t offset, bytes, at; } table[] = {
        {0, 100, 0}, {100, 200, 256}, {300, 0, 512}, {300, 56, 512}, {380, 10, 768}, /* one upload */
        {5000, 10, 4000},                                                          /* far in the file */
        {5010, 10, 9000},                                                          /* far on the device */
        {5020, 10, 8000},                                                          /* before on the device */
    };
    enum { COUNT = sizeof table / sizeof table[0] };
    xd_piece pieces[COUNT];
    for (int i = 0; i < COUNT; i++)
        pieces[i] = (xd_piece){.fd = plain, .direct_fd = -1, .offset = table[i].offset, .bytes = table[i].bytes,
                               .address = to.address + table[i].at};
    run(pieces, COUNT, (xd_reader_options){0});
    CHECK_EQ(uploads(), 4);
    CHECK_HAS(rec.log, ", 778\n");
    /* The bytes between two tensors are nobody's, and the same each time: what followed in the file, or zero. */
    const unsigned char *device = (const unsigned char *)(uintptr_t)to.address;
    CHECK_EQ(device[100], 0);
    CHECK_EQ(device[255], 0);
    CHECK_EQ(device[512 + 56], content[356]);
    CHECK_EQ(device[778], 0xA5);

    recorder_clear(&rec);
    pieces[1].fd = other; /* another file */
    pieces[2].device = 1;
    run(pieces, 2, (xd_reader_options){0});
    CHECK_EQ(uploads(), 2);
    xd_buffer_close(&to.buffer);
}

static void two_devices(void)
{
    target to[2] = {on_device(0, FILE_BYTES), on_device(1, FILE_BYTES)};
    xd_piece pieces[40];
    for (int i = 0; i < 40; i++)
        pieces[i] = (xd_piece){.fd = plain, .direct_fd = -1, .device = i % 2, .offset = (uint64_t)i * 1000,
                               .bytes = 1000, .address = to[i % 2].address + (uint64_t)(i / 2) * 1024};
    run(pieces, 40, (xd_reader_options){0});
    CHECK_EQ(uploads(), 40);
    for (int i = 0; i < 2; i++)
        xd_buffer_close(&to[i].buffer);
}

/* More runs of bytes than one call may name. */
static void many_small(void)
{
    enum { COUNT = 400 };
    target to = on_device(0, COUNT * 16);
    xd_piece pieces[COUNT];
    for (uint64_t i = 0; i < COUNT; i++)
        pieces[i] = (xd_piece){.fd = plain, .direct_fd = -1, .offset = i * 3, .bytes = 3, .address = to.address + i * 16};
    run(pieces, COUNT, (xd_reader_options){0});
    CHECK_EQ(uploads(), 4);
    for (uint64_t i = 0; i < COUNT; i++)
        pieces[i].direct_fd = direct;
    recorder_clear(&rec);
    run(pieces, COUNT, (xd_reader_options){.io = XD_IO_DIRECT});
    CHECK_EQ(uploads(), COUNT);
    xd_buffer_close(&to.buffer);
}

/* ---- direct reads ---- */

typedef struct script {
    int calls, direct_calls;
    int code, at; /* the errno of direct call number `at` and those after it */
    int64_t held; /* what the page cache claims, per cent */
    uint64_t most;
    int waited; /* every upload so far has been asked for */
} script;

static script now;

static ssize_t scripted_preadv(int fd, const struct iovec *parts, int count, off_t offset)
{
    now.calls++;
    if (now.waited)
        CHECK_EQ(rec.queries, uploads());
    if (fd == direct) {
        CHECK_EQ((uint64_t)offset % PAGE, 0);
        CHECK_EQ(parts[0].iov_len % PAGE, 0);
        CHECK_EQ((uint64_t)(uintptr_t)parts[0].iov_base % PAGE, 0);
        if (++now.direct_calls >= now.at && now.code) {
            errno = now.code;
            return -1;
        }
    }
    ssize_t n = preadv(fd, parts, count, offset);
    return now.most && n > (ssize_t)now.most ? (ssize_t)now.most : n;
}

static int64_t scripted_cached(int fd, uint64_t offset, uint64_t bytes)
{
    (void)fd, (void)offset;
    return now.held < 0 ? -1 : (int64_t)bytes * now.held / 100;
}

static const xd_io scripted = {.preadv = scripted_preadv, .cached = scripted_cached};

static void direct_reads(void)
{
    target to = on_device(0, FILE_BYTES + PAGE);
    xd_piece pieces[] = {
        {.fd = plain, .direct_fd = direct, .offset = 77, .bytes = 30000, .address = to.address},
        {.fd = plain, .direct_fd = direct, .offset = 30077, .bytes = FILE_BYTES - 30077, .address = to.address + 30000},
    };
    now = (script){0};
    xd_reader_options options = {.calls = &scripted, .tile_bytes = 4 * PAGE};
    run(pieces, 2, options);
    CHECK_EQ(now.direct_calls, now.calls); /* the end of the file is no whole page, and no second call */
    CHECK_EQ(now.calls, (FILE_BYTES + 4 * PAGE - 1) / (4 * PAGE)); /* whole pages are read once */

    now = (script){.held = 100};
    run(pieces, 2, options);
    CHECK_EQ(now.direct_calls, 0);
    now = (script){.held = -1};
    run(pieces, 2, options);
    CHECK_EQ(now.direct_calls, 0);
    now = (script){.most = 5000}; /* a short read goes on through the page cache */
    run(pieces, 2, options);
    CHECK(now.direct_calls && now.calls > 2 * now.direct_calls);

    static const int refusals[] = {EINVAL, EFAULT, EOPNOTSUPP};
    for (int i = 0; i < 3; i++) {
        now = (script){.code = refusals[i], .at = 3};
        xd_reader *reader = open_reader(pieces, 2, options);
        OK(xd_reader_run(reader, &err));
        CHECK_EQ(xd_reader_refused(reader, plain), refusals[i]);
        CHECK_EQ(now.direct_calls, 3);
        CHECK_EQ(progress(reader, 0).direct, 2 * 4 * PAGE - 77);
        xd_reader_close(&reader);
        now = (script){.code = refusals[i], .at = 3};
        options.io = XD_IO_DIRECT;
        reader = open_reader(pieces, 2, options);
        FAILS(xd_reader_run(reader, &err), XD_READ);
        CHECK_EQ(err.code, refusals[i]);
        xd_reader_close(&reader);
        options.io = XD_IO_AUTO;
    }
    now = (script){.code = EIO, .at = 2};
    xd_reader *reader = open_reader(pieces, 2, options);
    FAILS(xd_reader_run(reader, &err), XD_READ);
    CHECK_HAS(err.text, "Input/output error");
    xd_reader_close(&reader);
    xd_buffer_close(&to.buffer);
}

/* ---- waiting for each upload, and one stream or more ---- */

static void synchronous(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = -1, .bytes = FILE_BYTES, .address = to.address};
    rec.queries = 0;
    now = (script){.waited = 1};
    run(&piece, 1, (xd_reader_options){.calls = &scripted, .tiles = 8, .workers = 1, .sync_uploads = 1});
    CHECK_EQ(now.calls, uploads());
    CHECK_EQ(now.calls, (FILE_BYTES + 2 * PAGE - 1) / (2 * PAGE));
    now = (script){0};
    xd_buffer_close(&to.buffer);
}

/* A ring that is not page-locked is waited for as well, also where nobody asked for that. */
static void pageable(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = -1, .bytes = FILE_BYTES, .address = to.address};
    xd_ring *ring;
    rec.table.pageable_alloc = rec.table.host_alloc; /* copies are from the recorder's memory alone */
    OK(xd_ring_open_pageable(&ring, runtime, 8, 2 * PAGE, &err));
    rec.queries = 0;
    now = (script){.waited = 1};
    run(&piece, 1, (xd_reader_options){.calls = &scripted, .ring = ring, .workers = 1});
    CHECK_EQ(now.calls, uploads());
    CHECK_EQ(now.calls, (FILE_BYTES + 2 * PAGE - 1) / (2 * PAGE));
    now = (script){0};
    rec.table.pageable_alloc = NULL;
    xd_buffer_close(&to.buffer);
}

static void streams(void)
{
    static const char *const names[] = {"first", "second", "third", NULL};
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = -1, .bytes = 8 * PAGE, .address = to.address};
    rec.names.streams = names;
    rec.made[0] = 0;
    xd_reader *reader = open_reader(&piece, 1, (xd_reader_options){.streams = 3});
    OK(xd_reader_run(reader, &err));
    CHECK_HAS(rec.log, "first copy");
    CHECK(!strstr(rec.log, "second copy"));
    xd_reader_close(&reader);
    FAILS(xd_reader_open(&reader, runtime, &piece, 1, &(xd_reader_options){.streams = 17}, &err), XD_INVALID);
    rec.names.streams = NULL;
    xd_buffer_close(&to.buffer);
}

/* ---- ends ---- */

/* A ring that was made before: the reader's own from then on, and still the caller's where the reader does not open. */
static void given_ring(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece one = {.fd = plain, .direct_fd = -1, .bytes = 5 * PAGE, .address = to.address}, bad = one;
    bad.device = 7;
    xd_ring *ring;
    xd_reader *reader = NULL;
    for (size_t count = 0; count < 2; count++) { /* nothing to read, too */
        OK(xd_ring_open(&ring, runtime, 2, PAGE, &err));
        xd_reader_options options = {.ring = ring, .tiles = 9, .tile_bytes = 9 * PAGE, .workers = 1};
        FAILS(xd_reader_open(&reader, runtime, &bad, 1, &options, &err), XD_INVALID);
        recorder_clear(&rec);
        OK(xd_reader_open(&reader, runtime, &one, count, &options, &err));
        OK(xd_reader_run(reader, &err));
        CHECK_EQ(uploads(), count ? 5 : 0);
        xd_live live;
        xd_runtime_live(runtime, &live);
        CHECK_EQ(live.rings, 1);
        CHECK_EQ(live.pinned_bytes, 2 * PAGE);
        xd_reader_close(&reader);
        xd_runtime_live(runtime, &live);
        CHECK_EQ(live.rings, 0);
    }
    check_bytes(to.address, 0, 5 * PAGE);
    recorder foreign;
    xd_runtime *another;
    recorder_open(&foreign, 1);
    OK(xd_runtime_open(&another, &foreign.table, NULL, &err));
    OK(xd_ring_open(&ring, another, 1, PAGE, &err));
    FAILS(xd_reader_open(&reader, runtime, &one, 1, &(xd_reader_options){.ring = ring}, &err), XD_INVALID);
    xd_ring_close(&ring);
    OK(xd_runtime_close(&another, &err));
    recorder_close(&foreign);
    xd_buffer_close(&to.buffer);
}

static void truncated(void)
{
    target to = on_device(0, FILE_BYTES);
    for (int io = 0; io < 2; io++) {
        xd_piece pieces[] = {
            {.fd = plain, .direct_fd = io ? direct : -1, .offset = 0, .bytes = 1000, .address = to.address},
            {.fd = plain, .direct_fd = io ? direct : -1, .offset = FILE_BYTES - 500, .bytes = 900,
             .address = to.address + 8192},
        };
        xd_reader *reader = open_reader(pieces, 2, (xd_reader_options){.io = io ? XD_IO_DIRECT : XD_IO_AUTO});
        FAILS(xd_reader_run(reader, &err), XD_TRUNCATED);
        CHECK_HAS(err.text, "900 bytes wanted at offset 199500, 500 present");
        CHECK_EQ(xd_reader_failed(reader), 1);
        FAILS(xd_reader_run(reader, &err), XD_TRUNCATED);
        xd_reader_close(&reader);
    }
    xd_buffer_close(&to.buffer);
}

static void cancelled(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = -1, .bytes = FILE_BYTES, .address = to.address};
    xd_reader *reader = open_reader(&piece, 1, (xd_reader_options){0});
    xd_reader_cancel(reader);
    xd_reader_cancel(reader);
    FAILS(xd_reader_run(reader, &err), XD_CANCELLED);
    CHECK_EQ(uploads(), 0);
    xd_reader_close(&reader);

    reader = open_reader(&piece, 1, (xd_reader_options){0}); /* after the last byte it still counts */
    OK(xd_reader_run(reader, &err));
    xd_reader_cancel(reader);
    FAILS(xd_reader_run(reader, &err), XD_CANCELLED);
    xd_reader_close(&reader);
    xd_reader_close(&reader);
    xd_reader_close(NULL);
    xd_buffer_close(&to.buffer);
}

enum { CANCELLED_AT = 5 };

static xd_reader *reading;
static atomic_int reads;

static ssize_t cancelling_preadv(int fd, const struct iovec *parts, int count, off_t offset)
{
    if (++reads == CANCELLED_AT)
        xd_reader_cancel(reading);
    return preadv(fd, parts, count, offset);
}

/* How soon, in tiles: a worker ends with the one that it is at. */
static void cancelled_half_way(void)
{
    static const xd_io calls = {.preadv = cancelling_preadv, .cached = scripted_cached};
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = -1, .bytes = FILE_BYTES, .address = to.address};
    for (unsigned workers = 1; workers <= 4; workers++) {
        reads = 0;
        reading = open_reader(&piece, 1, (xd_reader_options){.tiles = 8, .workers = workers, .calls = &calls,
                                                             .tile_bytes = PAGE});
        FAILS(xd_reader_run_all(reading, 0, &err), XD_CANCELLED);
        CHECK(reads >= CANCELLED_AT && reads < CANCELLED_AT + (int)workers);
        CHECK(progress(reading, 0).done <= CANCELLED_AT * PAGE + (workers - 1) * PAGE);
        CHECK_EQ(xd_reader_failed(reading), -1);
        xd_reader_close(&reading);
    }
    xd_buffer_close(&to.buffer);
}

static void *work(void *reader)
{
    xd_error own;
    return (void *)(intptr_t)xd_reader_run(reader, &own);
}

static void together(int sync)
{
    target to[2] = {on_device(0, FILE_BYTES), on_device(1, FILE_BYTES)};
    xd_piece pieces[2];
    for (int i = 0; i < 2; i++)
        pieces[i] = (xd_piece){.fd = i ? other : plain, .direct_fd = -1, .device = i, .bytes = FILE_BYTES,
                               .address = to[i].address};
    xd_reader *reader = open_reader(pieces, 2, (xd_reader_options){.tiles = 3, .sync_uploads = sync});
    pthread_t threads[6];
    for (int i = 0; i < 6; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, work, reader), 0);
    for (int i = 0; i < 6; i++) {
        void *status;
        pthread_join(threads[i], &status);
        CHECK_EQ((intptr_t)status, XD_OK);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(progress(reader, i).done, FILE_BYTES);
        CHECK(progress(reader, i).last > 0);
        check_bytes(to[i].address, 0, FILE_BYTES);
    }
    xd_reader_close(&reader);

    /* Closing ends workers that are at it. */
    reader = open_reader(pieces, 2, (xd_reader_options){.tiles = 3, .sync_uploads = sync, .tile_bytes = 512});
    for (int i = 0; i < 6; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, work, reader), 0);
    while (!progress(reader, 0).done)
        ;
    xd_reader_cancel(reader);
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    xd_reader_close(&reader);
    for (int i = 0; i < 2; i++)
        xd_buffer_close(&to[i].buffer);
}

/* Workers on threads of the reader's own, and the first error of any. */
static void all_workers(void)
{
    target to[2] = {on_device(0, FILE_BYTES), on_device(1, FILE_BYTES)};
    xd_piece pieces[3];
    for (int i = 0; i < 2; i++)
        pieces[i] = (xd_piece){.fd = i ? other : plain, .direct_fd = -1, .device = i, .bytes = FILE_BYTES,
                               .address = to[i].address};
    static const unsigned counts[] = {1, 2, 7, 64};
    for (int i = 0; i < 4; i++) {
        xd_reader_options options = {.workers = counts[i], .tiles = 2 * counts[i], .tile_bytes = PAGE, .verify = 1};
        for (int device = 0; device < 2; device++)
            memset((void *)(uintptr_t)to[device].address, 0xA5, FILE_BYTES);
        xd_reader *reader = open_reader(pieces, 2, options);
        OK(xd_reader_run_all(reader, 0, &err));
        for (int device = 0; device < 2; device++) {
            CHECK_EQ(progress(reader, device).done, FILE_BYTES);
            check_bytes(to[device].address, 0, FILE_BYTES);
        }
        OK(xd_reader_run_all(reader, 1, &err));
        xd_reader_close(&reader);
        recorder_clear(&rec);

        reader = open_reader(pieces, 2, options);
        OK(xd_reader_run_all(reader, 0, &err));
        ((unsigned char *)(uintptr_t)to[1].address)[FILE_BYTES - 1] ^= 1;
        FAILS(xd_reader_run_all(reader, 1, &err), XD_DRIVER);
        CHECK_HAS(err.text, "device 1 does not hold what was read");
        xd_reader_close(&reader);
        recorder_clear(&rec);

        pieces[2] = (xd_piece){.fd = plain, .direct_fd = -1, .offset = FILE_BYTES - 9, .bytes = 10,
                               .address = to[0].address};
        reader = open_reader(pieces, 3, options);
        FAILS(xd_reader_run_all(reader, 0, &err), XD_TRUNCATED);
        CHECK_EQ(xd_reader_failed(reader), 2);
        xd_reader_close(&reader);
        recorder_clear(&rec);
    }
    xd_reader *reader = NULL;
    FAILS(xd_reader_open(&reader, runtime, pieces, 1, &(xd_reader_options){.workers = 65}, &err), XD_INVALID);
    for (int i = 0; i < 2; i++)
        xd_buffer_close(&to[i].buffer);
}

static void refusals(void)
{
    xd_reader *reader = NULL;
    xd_piece good = {.fd = plain, .direct_fd = -1, .bytes = 1, .address = 4096}, bad = good;
    bad.fd = -1;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, NULL, &err), XD_INVALID);
    bad = good;
    bad.device = 2;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, NULL, &err), XD_INVALID);
    bad = good;
    bad.offset = UINT64_MAX;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, NULL, &err), XD_INVALID);
    bad.offset = INT64_MAX;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, NULL, &err), XD_INVALID);
    bad = good;
    bad.address = UINT64_MAX;
    bad.bytes = 2;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, NULL, &err), XD_INVALID);
    bad = good;
    bad.direct_fd = direct;
    FAILS(xd_reader_open(&reader, runtime, &bad, 1, &(xd_reader_options){.tile_bytes = 5000}, &err), XD_INVALID);
    FAILS(xd_reader_open(&reader, runtime, &good, 1, &(xd_reader_options){.tile_bytes = (1u << 30) + 4096}, &err),
          XD_INVALID);
    CHECK(!reader);

    /* Nothing to read: no ring, no stream. */
    good.bytes = 0;
    for (size_t count = 0; count < 2; count++) {
        OK(xd_reader_open(&reader, runtime, &good, count, NULL, &err));
        CHECK_EQ(rec.live, 0);
        OK(xd_reader_run(reader, &err));
            CHECK_EQ(progress(reader, 0).done, 0);
        xd_progress found;
        CHECK(!xd_reader_progress(reader, 2, &found) && !xd_reader_progress(reader, -1, &found));
        CHECK_EQ(xd_reader_refused(reader, 7), 0);
        xd_live live;
        xd_runtime_live(runtime, &live);
        CHECK_EQ(live.readers, 1);
        xd_reader_close(&reader);
    }
}

/* The system's own answer about the page cache. */
static void page_cache(void)
{
    target to = on_device(0, FILE_BYTES);
    xd_piece piece = {.fd = plain, .direct_fd = direct, .bytes = FILE_BYTES, .address = to.address};
    unsigned char byte;
    for (off_t at = 0; at < FILE_BYTES; at += (off_t)PAGE) /* now it is held */
        CHECK_EQ(pread(plain, &byte, 1, at), 1);
    xd_reader *reader = open_reader(&piece, 1, (xd_reader_options){0});
    OK(xd_reader_run(reader, &err));
    CHECK_EQ(progress(reader, 0).direct, 0);
    check_bytes(to.address, 0, FILE_BYTES);
    xd_reader_close(&reader);
    xd_buffer_close(&to.buffer);
}

int main(void)
{
    make_file();
    recorder_open(&rec, 2);
    OK(xd_runtime_open(&runtime, &rec.table, NULL, &err));
    cuts();
    neighbours();
    two_devices();
    many_small();
    direct_reads();
    synchronous();
    pageable();
    streams();
    given_ring();
    truncated();
    cancelled();
    cancelled_half_way();
    together(0);
    together(1);
    all_workers();
    refusals();
    page_cache();
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    recorder_close(&rec);
    close(plain);
    close(other);
    close(direct);
    return 0;
}
