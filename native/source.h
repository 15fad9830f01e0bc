/* Bytes of a file into memory: through the page cache, or past it. */
#ifndef XDEV_SOURCE_H
#define XDEV_SOURCE_H

#include <stdatomic.h>

#include "xdev.h"

enum {
    XD_SOURCE_PAGE = 4096,      /* what direct I/O wants addresses, offsets and lengths to be multiples of */
    XD_SOURCE_MAX_SPANS = 128
};

typedef struct xd_source {
    int fd, direct_fd;
    int in_memory;      /* a file system without a disk: nothing is ever cold */
    atomic_int refused; /* the errno that ended direct I/O here; 0: it works, or was not tried */
} xd_source;

/* A run of bytes in the file that is a run in memory too. */
typedef struct xd_span {
    uint64_t offset, bytes; /* in the file */
    uint64_t at;            /* in memory */
} xd_span;

/* Spans that follow each other in the file without a gap, and in memory in the same order. */
typedef struct xd_extent {
    int spans;
    uint64_t end;   /* in the file */
    uint64_t bytes; /* of memory */
    xd_span span[XD_SOURCE_MAX_SPANS];
} xd_extent;

extern const xd_io xd_source_calls; /* the system's */

int xd_source_in_memory(int fd);

/* Where in the file an extent must end that begins at `offset`, so that a direct read, widened to whole pages, fits into
   `room` bytes. */
uint64_t xd_source_limit(const xd_source *source, uint64_t offset, uint64_t room);

/* Reads all of it or fails: XD_READ, or XD_TRUNCATED where the file ends too early. *direct: it was read past the page
   cache and lies in memory as in the file, from xd_source_direct_at on; otherwise every span is at its place and the
   bytes between two spans are zero. */
int xd_source_read(xd_source *source, const xd_io *calls, int io, const xd_extent *extent, char *memory, int *direct,
                   xd_error *err);
uint64_t xd_source_direct_at(const xd_extent *extent, uint64_t offset);

#endif
