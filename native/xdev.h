/*
 * xdev: streams, events, memory, links, a throttle and a file reader over several devices.
 *
 * This header is the whole public C API. The rules that hold for all of it:
 *
 *   - int functions return XD_OK or a negative status. Whoever first decides on an error fills *err; everybody else
 *     passes it on. Outputs are written on success only. err may be NULL.
 *   - "not yet" and "not possible" are answers, written through an int *, never statuses.
 *   - create and open can fail and then leave nothing behind. close is void, accepts NULL and takes the address of
 *     the pointer, which it clears, so closing twice is harmless.
 *   - children keep their runtime busy: xd_runtime_close() refuses while any is alive, and names them.
 *   - no global and no thread-local state. Every object may be used from any thread; a link, a ring, a throttle and a
 *     reader take their own lock, the rest rely on the driver's own thread safety.
 *   - times are nanoseconds on the runtime's clock: the host's monotonic clock, or simulated time.
 */
#ifndef XDEV_H
#define XDEV_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- errors (error.c) ------------------------------------------------------------------------------------------ */

/* name, value, text. The Python exception of each stands in pyxdev/errors.py. */
#define XD_STATUSES(X)                                                            \
    X(OK, 0, "success")                                                           \
    X(INVALID, -1, "invalid argument")                                            \
    X(NO_DEVICE_MEMORY, -2, "out of device memory")                               \
    X(NO_PINNED_MEMORY, -3, "out of page-locked host memory")                     \
    X(NO_HOST_MEMORY, -4, "out of host memory")                                   \
    X(UNSUPPORTED, -5, "not supported by this backend")                           \
    X(NO_DEVICE, -6, "no usable device")                                          \
    X(NO_PEER, -7, "no peer access between the devices")                          \
    X(BUSY, -8, "children are still alive")                                       \
    X(DEVICE_FAULT, -9, "the device has failed")                                  \
    X(DRIVER, -10, "the driver reported an error")                                \
    X(CANCELLED, -11, "cancelled")                                                \
    X(READ, -12, "reading a file failed")                                         \
    X(TRUNCATED, -13, "the file ends too early")                                  \
    X(ORDER, -14, "two operations are not ordered")                               \
    X(FORKED, -15, "the runtime belongs to the parent process")

enum {
#define XD_ENUM(name, value, text) XD_##name = (value),
    XD_STATUSES(XD_ENUM)
#undef XD_ENUM
};

typedef struct xd_error {
    int status;         /* one of the list above */
    int code;           /* the driver's own code or errno; 0 if there is none */
    char operation[32]; /* what was being done, "event_record" */
    char text[472];     /* one sentence: the thing, the value, what is allowed */
} xd_error;

const char *xd_status_name(int status); /* "NO_PEER" */
const char *xd_status_text(int status); /* "no peer access between the devices" */

/* Fills *err (if any) and returns status, so that a function can end in `return xd_fail(err, ...)`. */
int xd_fail(xd_error *err, int status, int code, const char *operation, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* ---- runtime (runtime.c) --------------------------------------------------------------------------------------- */

#define XD_HOST (-1)          /* the device ordinal of page-locked host memory */
#define XD_FOREVER UINT64_MAX /* a time-out that never comes */

typedef struct xd_driver xd_driver; /* see driver.h; made by xd_sim_create, xd_cuda_create, xd_hip_create, xd_fault_create */
typedef struct xd_runtime xd_runtime;
typedef struct xd_stream xd_stream;
typedef struct xd_event xd_event;
typedef struct xd_graph xd_graph;
typedef struct xd_buffer xd_buffer;
typedef struct xd_ring xd_ring;
typedef struct xd_link xd_link;
typedef struct xd_throttle xd_throttle;
typedef struct xd_reader xd_reader;

typedef struct xd_device_info {
    char name[128];
    char uuid[48];    /* "GPU-8f0d2c1e-...", empty if the driver has none */
    char pci[24];     /* "0000:3b:00.0", empty if there is none */
    char arch[24];    /* "sm_90", "gfx906", "sim" */
    uint64_t memory;  /* bytes */
    int integrated;   /* shares the host's memory */
    int copy_engines; /* 0 if unknown */
} xd_device_info;

typedef struct xd_live { /* what is alive now; all zero after everything is closed */
    int64_t streams, events, graphs, buffers, rings, links, throttles, readers;
    int64_t device_bytes, pinned_bytes; /* of buffers; besides, a runtime keeps one page-locked block of 8 to 64 MiB */
} xd_live;

typedef struct xd_runtime_options {
    int force_sync; /* 1: a wait of one device for another is done by the host (device-side waits do not work) */
} xd_runtime_options;

/* Takes the driver over on success; on failure it stays the caller's. options may be NULL. */
int xd_runtime_open(xd_runtime **out, xd_driver *driver, const xd_runtime_options *options, xd_error *err);
int xd_runtime_close(xd_runtime **runtime, xd_error *err); /* XD_BUSY while children live; NULL is fine */
void xd_runtime_live(xd_runtime *runtime, xd_live *out);
const char *xd_runtime_backend(const xd_runtime *runtime);
int xd_runtime_device_count(const xd_runtime *runtime);
int xd_runtime_device_info(xd_runtime *runtime, int device, xd_device_info *out, xd_error *err);
int xd_runtime_memory_info(xd_runtime *runtime, int device, uint64_t *free_bytes, uint64_t *total_bytes, xd_error *err);
int xd_runtime_peer_capable(xd_runtime *runtime, int device, int peer, int *capable, xd_error *err);
/* Enabled on first use, never disabled. *enabled is 0 where the pair is not capable or the driver's limit is reached. */
int xd_runtime_peer_enable(xd_runtime *runtime, int device, int peer, int *enabled, xd_error *err);
uint64_t xd_runtime_clock(xd_runtime *runtime); /* ns */
/* From now on (or no longer) the host does the waits between devices. */
void xd_runtime_force_sync(xd_runtime *runtime, int on);
int xd_runtime_forced_sync(const xd_runtime *runtime);

/* ---- streams and events (stream.c) ----------------------------------------------------------------------------- */

int xd_stream_open(xd_stream **out, xd_runtime *runtime, int device, xd_error *err);
/* Somebody else's stream by its vendor handle: closing leaves it alone, and it must outlive this object. */
int xd_stream_adopt(xd_stream **out, xd_runtime *runtime, int device, void *handle, xd_error *err);
void xd_stream_close(xd_stream **stream); /* work already queued still runs */
int xd_stream_device(const xd_stream *stream);
void *xd_stream_handle(const xd_stream *stream); /* the vendor's stream */
/* Everything queued after this runs after what the event stood for at its last record. Never recorded: no effect.
   Blocks the host only under force_sync, for an event of another device. */
int xd_stream_wait(xd_stream *stream, xd_event *event, xd_error *err);
int xd_stream_query(xd_stream *stream, int *idle, xd_error *err);
int xd_stream_fill(xd_stream *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err);
/* Host to device, device to host, or within the stream's device. One- or two-dimensional. Overlap is XD_INVALID. */
typedef struct xd_transfer {
    int dst_device, src_device; /* XD_HOST for page-locked memory */
    uint64_t dst, src;          /* addresses */
    uint64_t width, height;     /* bytes a row, rows; height 1 for one-dimensional */
    uint64_t dst_pitch, src_pitch; /* bytes between rows; not read when height is 1 */
} xd_transfer;
int xd_stream_copy(xd_stream *stream, const xd_transfer *transfer, xd_error *err);

typedef struct xd_range { /* bytes that a kernel reads or writes, for the ordering checker of simulated devices */
    int device;
    uint64_t address, bytes;
    int write;
} xd_range;
typedef struct xd_kernel {
    int (*run)(void *arg);   /* 0, or anything else for a device fault. Makes no call into this library. */
    void (*drop)(void *arg); /* once, when run is over or will never be; may be NULL */
    void *arg;
    uint64_t cost;      /* ns of the device's compute engine; simulated devices only */
    const char *label;  /* for traces, copied; may be NULL */
    const xd_range *ranges; /* copied */
    size_t range_count;
} xd_kernel;
/* A host function as a kernel, in stream order. drop is called on failure too. */
int xd_stream_launch(xd_stream *stream, const xd_kernel *kernel, xd_error *err);

/* A stage as a C function. On CUDA and HIP it is called when the stage is submitted: it queues its work on `stream`, the
   vendor's handle, and returns; the stream's device is current. On simulated devices it is called when the stream gets
   there, with NULL for a stream, and does its work itself. Sizes are those of the inputs, in bytes; the arrays are good
   until it returns, the memory for what it queues. 0: well; everything else is an error of the stage, with that code. */
typedef int (*xd_function)(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs, void *user);
/* Calls it now, with the stream's handle. *code is what it returned. */
int xd_stream_call(xd_stream *stream, xd_function function, void *const *inputs, const uint64_t *sizes,
                   void *const *outputs, void *user, int *code, xd_error *err);

/* An event belongs to the device of the stream that last recorded it: the vendor's event of a device is made at the
   first record there. */
int xd_event_open(xd_event **out, xd_runtime *runtime, int timing, xd_error *err);
void xd_event_close(xd_event **event);
int xd_event_record(xd_event *event, xd_stream *stream, xd_error *err);
int xd_event_query(xd_event *event, int *done, xd_error *err); /* never recorded: done */
/* Waits at most timeout ns (XD_FOREVER: no limit); *done tells whether it came. */
int xd_event_wait(xd_event *event, uint64_t timeout, int *done, xd_error *err);
/* Both events with timing, recorded on one device and done; otherwise XD_INVALID. */
int xd_event_elapsed(xd_event *begin, xd_event *end, double *seconds, xd_error *err);
int xd_event_device(const xd_event *event); /* XD_HOST before the first record */

/* ---- graphs (graph.c) ------------------------------------------------------------------------------------------ */

/* What this thread queues on the stream from now on is recorded and does not run: kernels, fills and copies, with the
   addresses that they have now. Until the end the thread must not wait, ask, allocate or free, and the stream must not
   wait for events from outside: that spoils the recording on some driver or other. XD_UNSUPPORTED: no graphs there. */
int xd_graph_begin(xd_stream *stream, xd_error *err);
/* Ends the recording, also when it fails because something in it was not allowed (XD_INVALID). */
int xd_graph_end(xd_graph **out, xd_stream *stream, xd_error *err);
/* Queues all of it, in order, on any stream of the device. The memory must still be there. */
int xd_graph_launch(xd_graph *graph, xd_stream *stream, xd_error *err);
void xd_graph_close(xd_graph **graph); /* the caller has made sure that no launch of it is still to run */
int xd_graph_device(const xd_graph *graph);

/* ---- memory (buffer.c) ----------------------------------------------------------------------------------------- */

/* device XD_HOST: page-locked host memory that every device can read and write. 0 bytes: address 0, no allocation. */
int xd_buffer_open(xd_buffer **out, xd_runtime *runtime, int device, uint64_t bytes, xd_error *err);
void xd_buffer_close(xd_buffer **buffer); /* the caller has made sure that no queued work uses it */
uint64_t xd_buffer_address(const xd_buffer *buffer);
uint64_t xd_buffer_bytes(const xd_buffer *buffer);
int xd_buffer_device(const xd_buffer *buffer);
/* The host is about to read or write page-locked memory: a check on simulated devices, nothing elsewhere. */
int xd_host_access(xd_runtime *runtime, const void *address, uint64_t bytes, int write, xd_error *err);

/* ---- the pinned ring (ring.c) ---------------------------------------------------------------------------------- */

/* A fixed number of page-locked tiles, handed out in turn. Each carries the event after which it may be written again:
   recorded by the last operation that read it. */
typedef struct xd_tile {
    void *address;
    uint64_t bytes;   /* the ring's tile size */
    unsigned index;
} xd_tile;

int xd_ring_open(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err);
/* Over memory that is not page-locked, for where there is none of that: the vendors' drivers copy it by ways of their own,
   so each copy is slow, and whoever queues one waits for it before the next. */
int xd_ring_open_pageable(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err);
int xd_ring_is_pageable(const xd_ring *ring);
void xd_ring_close(xd_ring **ring); /* waits for tiles in flight */
unsigned xd_ring_tiles(const xd_ring *ring);
uint64_t xd_ring_tile_bytes(const xd_ring *ring);
/* The next tile, once the host may write it. Blocks; gives up after timeout ns: *got is 0 then. */
int xd_ring_acquire(xd_ring *ring, uint64_t timeout, xd_tile *out, int *got, xd_error *err);
/* The tile's last reader is queued on this stream: it is free when the stream gets there. Takes the tile even when it
   fails; a tile whose use could not be recorded is never handed out again: XD_DEVICE_FAULT in its turn. */
int xd_ring_submit(xd_ring *ring, const xd_tile *tile, xd_stream *reader, xd_error *err);
/* Hands an unused tile back. */
void xd_ring_release(xd_ring *ring, const xd_tile *tile);
/* Waits until no tile is in flight. */
int xd_ring_drain(xd_ring *ring, xd_error *err);

/* ---- links (link.c) -------------------------------------------------------------------------------------------- */

enum { XD_DIRECT = 0, XD_STAGED = 1, XD_BY_SIZE = 2 };

typedef struct xd_link_options {
    int path;              /* XD_DIRECT, XD_STAGED, or XD_BY_SIZE: direct from direct_from up to below direct_to bytes */
    uint64_t direct_from;
    uint64_t direct_to;    /* 0: no end */
    uint64_t max_bytes;    /* the largest copy expected: bounds the ring. 0: unknown, the ring has its full size */
    uint64_t tile_bytes;   /* 0: fitted to each copy, sqrt(6.5 us * rate * bytes) */
    unsigned tiles;        /* 0: 4 */
    double rate;           /* bytes/s of the slower leg; 0: 50e9 */
    int gate;              /* 0: do not wait for the destination to be free (wrong results are then possible) */
} xd_link_options;

/* One ordered pair of devices; both may be the same device, which XD_STAGED sends through the host as well: to try the
   path where only one device is at hand. XD_DIRECT without peer access is XD_NO_PEER. */
int xd_link_open(xd_link **out, xd_runtime *runtime, int src_device, int dst_device, const xd_link_options *options,
                 xd_error *err);
void xd_link_close(xd_link **link); /* waits for copies in flight */

typedef struct xd_copy {
    uint64_t dst, src;
    uint64_t width, height;        /* as in xd_transfer; 0 bytes copies nothing and keeps the order */
    uint64_t dst_pitch, src_pitch;
    xd_event *source_ready; /* waited for before the source is read; NULL: ready */
    xd_event *dest_free;    /* waited for before the destination is written; NULL: free */
    xd_event *released;     /* recorded when the source has been read; NULL: not wanted */
    xd_event *arrived;      /* recorded when the destination has been written; NULL: not wanted; may equal released */
} xd_copy;
/* Enqueues; never waits for a device (unless force_sync). After an error nothing of this copy is in flight any more and
   no event that it recorded is pending, for the link has waited; what is in the destination is undefined. Where the
   wait failed too, the link is broken and every later copy on it is XD_DEVICE_FAULT. */
int xd_link_copy(xd_link *link, const xd_copy *copy, xd_error *err);
/* Waits until no copy is in flight. XD_DEVICE_FAULT if that cannot be brought about: the link is of no use then. */
int xd_link_drain(xd_link *link, xd_error *err);
int xd_link_path(const xd_link *link, uint64_t bytes);  /* XD_DIRECT or XD_STAGED */
uint64_t xd_link_tile(const xd_link *link, uint64_t bytes); /* tile size a staged copy of this size uses */
uint64_t xd_link_pinned_bytes(const xd_link *link);

/* ---- the throttle (throttle.c) --------------------------------------------------------------------------------- */

/* At most `limit` admitted and not yet retired. Retirement is an event at the end of the last stage. */
int xd_throttle_open(xd_throttle **out, xd_runtime *runtime, unsigned limit, xd_error *err);
void xd_throttle_close(xd_throttle **throttle);
/* Waits until fewer than limit are in flight, then takes a place; *admitted is 0 when timeout ns passed first. */
int xd_throttle_admit(xd_throttle *throttle, uint64_t timeout, int *admitted, xd_error *err);
/* The oldest place without an exit event leaves when `stream` gets here. */
int xd_throttle_retire(xd_throttle *throttle, xd_stream *stream, xd_error *err);
/* The same for an event that has been recorded already. It must stay open, and as it is, until the place is left: at the
   latest when `limit` more have been retired. */
int xd_throttle_retire_at(xd_throttle *throttle, xd_event *event, xd_error *err);
/* Gives the newest place back: the microbatch never ran. */
void xd_throttle_withdraw(xd_throttle *throttle);
int xd_throttle_in_flight(xd_throttle *throttle, unsigned *count, xd_error *err);
uint64_t xd_throttle_blocked(const xd_throttle *throttle); /* ns spent waiting in admit so far */

/* ---- the reader (reader.c) ------------------------------------------------------------------------------------- */

/* A range of a file that goes to one range of device memory. */
typedef struct xd_piece {
    int fd;
    int direct_fd;   /* the same file opened with O_DIRECT, or -1 */
    int device;
    uint64_t offset, bytes;
    uint64_t address;
} xd_piece;

/* How a tile is read from a file that has a direct_fd. */
enum {
    XD_IO_AUTO = 0,  /* what the page cache holds through the page cache, the rest directly where that works */
    XD_IO_DIRECT = 1 /* directly; where that is refused, XD_READ */
};

struct iovec;
/* The system calls of the reader, so that a test can put others in their place. Both set errno. */
typedef struct xd_io {
    ssize_t (*preadv)(int fd, const struct iovec *parts, int count, off_t offset);
    /* How many of these bytes the page cache holds; -1 where the kernel does not tell. */
    int64_t (*cached)(int fd, uint64_t offset, uint64_t bytes);
} xd_io;

typedef struct xd_reader_options {
    unsigned tiles;       /* of the pinned ring; 0: 16 */
    unsigned workers;     /* how many run at once, 64 at most: each keeps its share of the tiles, one at least; 0: 4 */
    unsigned streams;     /* of a device: the workers take turns; 0: 1 */
    uint64_t tile_bytes;  /* 0: 2 MiB; a multiple of 4096 if any piece has a direct_fd */
    int sync_uploads;     /* 1: each worker waits for its upload before it reads on; as with a pageable ring */
    int io;               /* XD_IO_AUTO or XD_IO_DIRECT */
    int verify;           /* 1: keeps a checksum of every upload for xd_reader_verify */
    xd_ring *ring;        /* instead of `tiles` and `tile_bytes`: one that the reader takes over if it opens; or NULL */
    const xd_io *calls;   /* NULL: the system's; must outlive the reader */
} xd_reader_options;

/* Pieces are copied; give them in file order, so that neighbours share a tile. Bytes of device memory between two pieces
   that share a tile (at most 4095) may be written too. Several workers may run at once; each takes the next tile's worth
   from one shared queue, for the device that is furthest behind. */
int xd_reader_open(xd_reader **out, xd_runtime *runtime, const xd_piece *pieces, size_t count,
                   const xd_reader_options *options, xd_error *err);
void xd_reader_close(xd_reader **reader); /* cancels, then waits for its workers and their uploads */
/* Runs until the queue is empty and all that this worker has read is on its device, the reader is cancelled
   (XD_CANCELLED) or any worker failed (its error). */
int xd_reader_run(xd_reader *reader, xd_error *err);
/* Reads back what was uploaded, as a worker, and compares checksums; after every worker has run. XD_DRIVER names the first
   range that a device does not hold as it was read. */
int xd_reader_verify(xd_reader *reader, xd_error *err);
/* Runs all workers, or all that verify: on the calling thread and on threads that end before this returns, fewer where
   the system has no more. */
int xd_reader_run_all(xd_reader *reader, int verify, xd_error *err);
void xd_reader_cancel(xd_reader *reader);
typedef struct xd_progress {
    uint64_t done;   /* bytes handed to the device so far */
    uint64_t direct; /* of them, read past the page cache */
    uint64_t first, last; /* when the first and the last of them were handed over: the host's clock, ns; 0: not yet */
} xd_progress;
int xd_reader_progress(const xd_reader *reader, int device, xd_progress *out); /* 0: there is no such device */
/* ns that all workers together have spent in reads, and waiting for tiles and uploads. */
void xd_reader_times(const xd_reader *reader, uint64_t *reading, uint64_t *waiting);
/* The errno with which direct I/O was refused for this file, after which it was read through the page cache; or 0. */
int xd_reader_refused(const xd_reader *reader, int fd);
/* The first piece of the tile that was being read when the first worker failed; -1 if none failed while reading. */
int64_t xd_reader_failed(const xd_reader *reader);

/* ---- headers of model files (scan.c) --------------------------------------------------------------------------- */

typedef struct xd_scan_type {
    const char *name; /* not read for GGUF */
    uint32_t values;  /* of a block; 1 for safetensors, 0: there is no such type */
    uint32_t bits;    /* of a block */
} xd_scan_type;

typedef struct xd_scan_entry {
    uint64_t offset, bytes;     /* of the data, from its beginning */
    uint32_t name, name_bytes;  /* in the header */
    uint32_t extents, rank;     /* in the array of extents, slowest dimension first */
    uint64_t hash;              /* of the name's bytes */
    int type;                   /* in the table of types */
} xd_scan_entry;

typedef struct xd_scan {
    size_t count; /* in: how many entries there is room for (GGUF: how many there are); out: how many there are */
    xd_scan_entry *entries;
    size_t extent_count, extent_room;
    uint64_t *extents;
    uint64_t reached; /* the end of the last entry's data */
    uint32_t metadata, metadata_bytes; /* __metadata__ in the header, 0 bytes if there is none */
} xd_scan;

/* Tell clean headers, whose entries come sorted by offset (equal ones as in the header) and were checked against what is
   present, from all others: 0 (GGUF: -1), which says only that somebody else must judge. Names may still be doubled
   (only if two hashes are equal) or not be UTF-8. */
int xd_scan_safetensors(xd_scan *scan, const char *header, size_t bytes, uint64_t present, const xd_scan_type *types,
                        size_t type_count);
/* The tensor entries of a GGUF header from `at` on. Returns where they end. */
int64_t xd_scan_gguf(xd_scan *scan, const void *header, size_t held, size_t at, uint64_t alignment, uint64_t file_bytes,
                     const xd_scan_type *types, size_t type_count);
/* Steps over `count` strings of a GGUF header. Returns where they end, -1 if that is not within what is held. */
int64_t xd_scan_gguf_strings(const void *header, size_t held, size_t at, uint64_t count);
/* For each entry the number of up to nine digits that follows one of the words in its name, both between dots: 3 in
   "blk.3.w". The first one, or -1. */
void xd_scan_numbers(const char *header, const xd_scan_entry *entries, size_t count, const char *const *words,
                     size_t word_count, int64_t *out);

#ifdef __cplusplus
}
#endif
#endif
