/* Bytes of a file into memory: through the page cache, or past it. */
#include "source.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { PAGE = XD_SOURCE_PAGE };

/* ---- the system's calls ---- */

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif

/* A share of whole pages as a share of these bytes, which may begin and end within one. */
static int64_t share(uint64_t held, uint64_t pages, uint64_t bytes)
{
    uint64_t there = held * (uint64_t)sysconf(_SC_PAGESIZE);
    return (int64_t)(held >= pages || there > bytes ? bytes : there);
}

static int64_t cached_by_mincore(int fd, uint64_t begin, uint64_t length, uint64_t pages, uint64_t bytes)
{
    unsigned char *seen = malloc(pages);
    void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, (off_t)begin);
    int known = seen && map != MAP_FAILED && mincore(map, length, seen) == 0;
    uint64_t held = 0;
    for (uint64_t i = 0; known && i < pages; i++)
        held += seen[i] & 1u;
    if (map != MAP_FAILED)
        munmap(map, length);
    free(seen);
    return known ? share(held, pages, bytes) : -1;
}

static int64_t cached(int fd, uint64_t offset, uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), begin = offset / page * page, length = offset + bytes - begin;
    uint64_t pages = (length + page - 1) / page;
    struct { uint64_t offset, bytes; } range = {begin, length};
    struct { uint64_t held, dirty, writeback, evicted, recently_evicted; } found;
    if (syscall(SYS_cachestat, fd, &range, &found, 0) == 0)
        return share(found.held, pages, bytes);
    return errno == ENOSYS ? cached_by_mincore(fd, begin, length, pages, bytes) : -1;
}

const xd_io xd_source_calls = {.preadv = preadv, .cached = cached};

int xd_source_in_memory(int fd)
{
    enum { TMPFS = 0x01021994 };
    static const unsigned RAMFS = 0x858458f6;
    struct statfs found;
    return fstatfs(fd, &found) == 0 && ((unsigned)found.f_type == TMPFS || (unsigned)found.f_type == RAMFS);
}

uint64_t xd_source_limit(const xd_source *source, uint64_t offset, uint64_t room)
{
    return (source->direct_fd < 0 ? offset : offset / PAGE * PAGE) + room;
}

/* ---- reading ---- */

static int fail_read(const xd_extent *extent, int code, const char *how, xd_error *err)
{
    char text[128];
    return xd_fail(err, XD_READ, code, "read", "reading %" PRIu64 " bytes at offset %" PRIu64 "%s failed: %s",
                   extent->end - extent->span[0].offset, extent->span[0].offset, how, strerror_r(code, text, sizeof text));
}

static int fail_short(const xd_extent *extent, uint64_t got, xd_error *err)
{
    uint64_t offset = extent->span[0].offset, wanted = extent->end - offset;
    return xd_fail(err, XD_TRUNCATED, 0, "read",
                   "ends early, it has shrunk since it was opened: %" PRIu64 " bytes wanted at offset %" PRIu64
                   ", %" PRIu64 " present",
                   wanted, offset, got < wanted ? got : wanted);
}

/* Reads until `wanted` bytes are there or the file ends. Returns 0 or an errno; *got counts either way. */
static int read_on(const xd_io *calls, int fd, struct iovec *parts, int count, uint64_t offset, uint64_t wanted,
                   uint64_t *got)
{
    while (*got < wanted) {
        ssize_t n = calls->preadv(fd, parts, count, (off_t)(offset + *got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : 0;
        *got += (uint64_t)n;
        size_t step = (size_t)n;
        while (count && step >= parts->iov_len) {
            step -= parts->iov_len;
            parts++;
            count--;
        }
        if (count) {
            parts->iov_base = (char *)parts->iov_base + step;
            parts->iov_len -= step;
        }
    }
    return 0;
}

/* Through the page cache, each span to its place. Returns 0 or an errno. */
static int read_spans(const xd_source *source, const xd_io *calls, const xd_extent *extent, char *memory, uint64_t *got)
{
    struct iovec parts[XD_SOURCE_MAX_SPANS];
    for (int i = 0; i < extent->spans; i++)
        parts[i] = (struct iovec){memory + extent->span[i].at, (size_t)extent->span[i].bytes};
    *got = 0;
    uint64_t begin = extent->span[0].offset;
    return read_on(calls, source->fd, parts, extent->spans, begin, extent->end - begin, got);
}

/* For memory that the kernel cannot write to, as some drivers' is: through ordinary memory. */
static int read_around(const xd_source *source, const xd_io *calls, const xd_extent *extent, char *memory, uint64_t *got)
{
    char *ordinary = malloc(extent->bytes);
    if (!ordinary)
        return ENOMEM;
    int code = read_spans(source, calls, extent, ordinary, got);
    for (int i = 0; i < extent->spans; i++)
        memcpy(memory + extent->span[i].at, ordinary + extent->span[i].at, extent->span[i].bytes);
    free(ordinary);
    return code;
}

static int read_buffered(const xd_source *source, const xd_io *calls, const xd_extent *extent, char *memory,
                         xd_error *err)
{
    uint64_t got;
    int code = read_spans(source, calls, extent, memory, &got);
    if (code == EFAULT)
        code = read_around(source, calls, extent, memory, &got);
    if (code)
        return fail_read(extent, code, "", err);
    if (got < extent->end - extent->span[0].offset)
        return fail_short(extent, got, err);
    for (int i = 1; i < extent->spans; i++) { /* nobody's bytes: the same each time */
        const xd_span *before = &extent->span[i - 1];
        memset(memory + before->at + before->bytes, 0, extent->span[i].at - before->at - before->bytes);
    }
    return XD_OK;
}

/* Whole pages, past the page cache. *refused: the errno of a file system or memory for which this does not work. */
static int read_direct(const xd_source *source, const xd_io *calls, const xd_extent *extent, char *memory, int *refused,
                       xd_error *err)
{
    uint64_t begin = extent->span[0].offset / PAGE * PAGE, wanted = extent->end - begin;
    struct iovec part = {memory, (size_t)((wanted + PAGE - 1) / PAGE * PAGE)};
    ssize_t n;
    do
        n = calls->preadv(source->direct_fd, &part, 1, (off_t)begin);
    while (n < 0 && errno == EINTR);
    int code = n < 0 ? errno : 0;
    *refused = code == EINVAL || code == EFAULT || code == EOPNOTSUPP ? code : 0;
    if (*refused)
        return XD_OK;
    uint64_t got = n < 0 ? 0 : (uint64_t)n;
    if (!code && got < wanted) { /* the rest may begin within a page */
        part = (struct iovec){memory + got, (size_t)(wanted - got)};
        code = read_on(calls, source->fd, &part, 1, begin, wanted, &got);
    }
    if (code)
        return fail_read(extent, code, " by direct I/O", err);
    uint64_t before = extent->span[0].offset - begin;
    return got < wanted ? fail_short(extent, got > before ? got - before : 0, err) : XD_OK;
}

static int wants_direct(const xd_source *source, const xd_io *calls, int io, const xd_extent *extent, const char *memory)
{
    if (source->direct_fd < 0)
        return 0;
    if (io == XD_IO_DIRECT)
        return 1;
    if (source->in_memory || source->refused || (uintptr_t)memory % PAGE)
        return 0;
    uint64_t offset = extent->span[0].offset, bytes = extent->end - offset;
    int64_t held = calls->cached(source->fd, offset, bytes);
    return held >= 0 && (uint64_t)held < bytes - bytes / 10;
}

uint64_t xd_source_direct_at(const xd_extent *extent, uint64_t offset)
{
    return offset - extent->span[0].offset / PAGE * PAGE;
}

int xd_source_read(xd_source *source, const xd_io *calls, int io, const xd_extent *extent, char *memory, int *direct,
                   xd_error *err)
{
    *direct = wants_direct(source, calls, io, extent, memory);
    if (*direct) {
        int refused;
        int status = read_direct(source, calls, extent, memory, &refused, err);
        if (status || !refused)
            return status;
        if (io == XD_IO_DIRECT)
            return fail_read(extent, refused, " by direct I/O, which was asked for,", err);
        source->refused = refused;
        *direct = 0;
    }
    return read_buffered(source, calls, extent, memory, err);
}
