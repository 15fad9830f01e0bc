# native/xdev.h and native/driver.h as Cython sees them.

from libc.stdint cimport int64_t, uint64_t


cdef extern from "xdev.h" nogil:
    enum:
        XD_OK
        XD_CANCELLED
        XD_HOST
        XD_DIRECT
        XD_STAGED
        XD_BY_SIZE
    const uint64_t XD_FOREVER

    ctypedef struct xd_error:
        int status
        int code
        char operation[32]
        char text[472]

    const char *xd_status_name(int status)
    const char *xd_status_text(int status)

    ctypedef struct xd_driver:
        const char *name
        void (*close)(xd_driver *driver) noexcept nogil
    ctypedef struct xd_runtime
    ctypedef struct xd_stream
    ctypedef struct xd_event
    ctypedef struct xd_graph
    ctypedef struct xd_buffer
    ctypedef struct xd_ring
    ctypedef struct xd_link
    ctypedef struct xd_throttle
    ctypedef struct xd_reader

    ctypedef struct xd_device_info:
        char name[128]
        char uuid[48]
        char pci[24]
        char arch[24]
        uint64_t memory
        int integrated
        int copy_engines

    ctypedef struct xd_live:
        int64_t streams, events, graphs, buffers, rings, links, throttles, readers
        int64_t device_bytes, pinned_bytes

    ctypedef struct xd_runtime_options:
        int force_sync

    int xd_runtime_open(xd_runtime **out, xd_driver *driver, const xd_runtime_options *options, xd_error *err)
    int xd_runtime_close(xd_runtime **runtime, xd_error *err)
    void xd_runtime_live(xd_runtime *runtime, xd_live *out)
    const char *xd_runtime_backend(const xd_runtime *runtime)
    int xd_runtime_device_count(const xd_runtime *runtime)
    int xd_runtime_device_info(xd_runtime *runtime, int device, xd_device_info *out, xd_error *err)
    int xd_runtime_memory_info(xd_runtime *runtime, int device, uint64_t *free_bytes, uint64_t *total_bytes,
                               xd_error *err)
    int xd_runtime_peer_capable(xd_runtime *runtime, int device, int peer, int *capable, xd_error *err)
    int xd_runtime_peer_enable(xd_runtime *runtime, int device, int peer, int *enabled, xd_error *err)
    uint64_t xd_runtime_clock(xd_runtime *runtime)
    void xd_runtime_force_sync(xd_runtime *runtime, int on)
    int xd_runtime_forced_sync(const xd_runtime *runtime)

    int xd_stream_open(xd_stream **out, xd_runtime *runtime, int device, xd_error *err)
    int xd_stream_adopt(xd_stream **out, xd_runtime *runtime, int device, void *handle, xd_error *err)
    void xd_stream_close(xd_stream **stream)
    int xd_stream_device(const xd_stream *stream)
    void *xd_stream_handle(const xd_stream *stream)
    int xd_stream_wait(xd_stream *stream, xd_event *event, xd_error *err)
    int xd_stream_query(xd_stream *stream, int *idle, xd_error *err)
    int xd_stream_fill(xd_stream *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err)

    ctypedef struct xd_transfer:
        int dst_device, src_device
        uint64_t dst, src
        uint64_t width, height
        uint64_t dst_pitch, src_pitch
    int xd_stream_copy(xd_stream *stream, const xd_transfer *transfer, xd_error *err)

    ctypedef struct xd_range:
        int device
        uint64_t address, bytes
        int write
    ctypedef struct xd_kernel:
        int (*run)(void *arg) noexcept nogil
        void (*drop)(void *arg) noexcept nogil
        void *arg
        uint64_t cost
        const char *label
        const xd_range *ranges
        size_t range_count
    int xd_stream_launch(xd_stream *stream, const xd_kernel *kernel, xd_error *err)

    ctypedef int (*xd_function)(void *stream, void *const *inputs, const uint64_t *sizes, void *const *outputs,
                                void *user) noexcept nogil
    int xd_stream_call(xd_stream *stream, xd_function function, void *const *inputs, const uint64_t *sizes,
                       void *const *outputs, void *user, int *code, xd_error *err)

    int xd_event_open(xd_event **out, xd_runtime *runtime, int timing, xd_error *err)
    void xd_event_close(xd_event **event)
    int xd_event_record(xd_event *event, xd_stream *stream, xd_error *err)
    int xd_event_query(xd_event *event, int *done, xd_error *err)
    int xd_event_wait(xd_event *event, uint64_t timeout, int *done, xd_error *err)
    int xd_event_elapsed(xd_event *begin, xd_event *end, double *seconds, xd_error *err)
    int xd_event_device(const xd_event *event)

    int xd_graph_begin(xd_stream *stream, xd_error *err)
    int xd_graph_end(xd_graph **out, xd_stream *stream, xd_error *err)
    int xd_graph_launch(xd_graph *graph, xd_stream *stream, xd_error *err)
    void xd_graph_close(xd_graph **graph)
    int xd_graph_device(const xd_graph *graph)

    int xd_buffer_open(xd_buffer **out, xd_runtime *runtime, int device, uint64_t bytes, xd_error *err)
    void xd_buffer_close(xd_buffer **buffer)
    uint64_t xd_buffer_address(const xd_buffer *buffer)
    uint64_t xd_buffer_bytes(const xd_buffer *buffer)
    int xd_buffer_device(const xd_buffer *buffer)
    int xd_host_access(xd_runtime *runtime, const void *address, uint64_t bytes, int write, xd_error *err)

    ctypedef struct xd_tile:
        void *address
        uint64_t bytes
        unsigned index
    int xd_ring_open(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err)
    int xd_ring_open_pageable(xd_ring **out, xd_runtime *runtime, unsigned tiles, uint64_t tile_bytes, xd_error *err)
    int xd_ring_is_pageable(const xd_ring *ring)
    void xd_ring_close(xd_ring **ring)
    unsigned xd_ring_tiles(const xd_ring *ring)
    uint64_t xd_ring_tile_bytes(const xd_ring *ring)
    int xd_ring_acquire(xd_ring *ring, uint64_t timeout, xd_tile *out, int *got, xd_error *err)
    int xd_ring_submit(xd_ring *ring, const xd_tile *tile, xd_stream *reader, xd_error *err)
    void xd_ring_release(xd_ring *ring, const xd_tile *tile)
    int xd_ring_drain(xd_ring *ring, xd_error *err)

    ctypedef struct xd_link_options:
        int path
        uint64_t direct_from
        uint64_t direct_to
        uint64_t max_bytes
        uint64_t tile_bytes
        unsigned tiles
        double rate
        int gate
    int xd_link_open(xd_link **out, xd_runtime *runtime, int src_device, int dst_device,
                     const xd_link_options *options, xd_error *err)
    void xd_link_close(xd_link **link)
    ctypedef struct xd_copy:
        uint64_t dst, src
        uint64_t width, height
        uint64_t dst_pitch, src_pitch
        xd_event *source_ready
        xd_event *dest_free
        xd_event *released
        xd_event *arrived
    int xd_link_copy(xd_link *link, const xd_copy *copy, xd_error *err)
    int xd_link_drain(xd_link *link, xd_error *err)
    int xd_link_path(const xd_link *link, uint64_t bytes)
    uint64_t xd_link_tile(const xd_link *link, uint64_t bytes)
    uint64_t xd_link_pinned_bytes(const xd_link *link)

    int xd_throttle_open(xd_throttle **out, xd_runtime *runtime, unsigned limit, xd_error *err)
    void xd_throttle_close(xd_throttle **throttle)
    int xd_throttle_admit(xd_throttle *throttle, uint64_t timeout, int *admitted, xd_error *err)
    int xd_throttle_retire(xd_throttle *throttle, xd_stream *stream, xd_error *err)
    int xd_throttle_retire_at(xd_throttle *throttle, xd_event *event, xd_error *err)
    void xd_throttle_withdraw(xd_throttle *throttle)
    int xd_throttle_in_flight(xd_throttle *throttle, unsigned *count, xd_error *err)
    uint64_t xd_throttle_blocked(const xd_throttle *throttle)

    ctypedef struct xd_piece:
        int fd, direct_fd, device
        uint64_t offset, bytes, address
    enum: XD_IO_AUTO, XD_IO_DIRECT
    ctypedef struct xd_io:
        pass
    ctypedef struct xd_reader_options:
        unsigned tiles
        unsigned workers
        unsigned streams
        uint64_t tile_bytes
        int sync_uploads
        int io
        int verify
        xd_ring *ring
        const xd_io *calls
    int xd_reader_open(xd_reader **out, xd_runtime *runtime, const xd_piece *pieces, size_t count,
                       const xd_reader_options *options, xd_error *err)
    void xd_reader_close(xd_reader **reader)
    int xd_reader_run_all(xd_reader *reader, int verify, xd_error *err)
    void xd_reader_cancel(xd_reader *reader)
    ctypedef struct xd_progress:
        uint64_t done, direct, first, last
    int xd_reader_progress(const xd_reader *reader, int device, xd_progress *out)
    void xd_reader_times(const xd_reader *reader, uint64_t *reading, uint64_t *waiting)
    int xd_reader_refused(const xd_reader *reader, int fd)
    int64_t xd_reader_failed(const xd_reader *reader)

    ctypedef struct xd_scan_type:
        const char *name
        unsigned values, bits
    ctypedef struct xd_scan_entry:
        uint64_t offset, bytes
        unsigned name, name_bytes
        unsigned extents, rank
        uint64_t hash
        int type
    ctypedef struct xd_scan:
        size_t count
        xd_scan_entry *entries
        size_t extent_count, extent_room
        uint64_t *extents
        uint64_t reached
        unsigned metadata, metadata_bytes
    int xd_scan_safetensors(xd_scan *scan, const char *header, size_t bytes, uint64_t present,
                            const xd_scan_type *types, size_t type_count)
    int64_t xd_scan_gguf(xd_scan *scan, const void *header, size_t held, size_t at, uint64_t alignment,
                         uint64_t file_bytes, const xd_scan_type *types, size_t type_count)
    int64_t xd_scan_gguf_strings(const void *header, size_t held, size_t at, uint64_t count)
    void xd_scan_numbers(const char *header, const xd_scan_entry *entries, size_t count, const char *const *words,
                         size_t word_count, int64_t *out)


cdef extern from "driver.h" nogil:
    ctypedef struct xd_symbol:
        const char *name
        void *address
    ctypedef struct xd_symbol_request:
        const char *name
        int version
        int optional
    int xd_cuda_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err)
    int xd_hip_create(xd_driver **out, const xd_symbol *symbols, size_t count, xd_error *err)
    const xd_symbol_request *xd_cuda_symbols()
    const xd_symbol_request *xd_hip_symbols()
    int xd_fault_create(xd_driver **out, xd_driver *inner, xd_error *err)
    void xd_fault_arm(xd_driver *fault, uint64_t at, int sticky, int status)
    uint64_t xd_fault_calls(const xd_driver *fault)


cdef extern from *:
    """
    /* DLPack 1.x, as published by the DLPack project; layout checked below. */
    typedef struct { int32_t device_type; int32_t device_id; } xd_dl_device;
    typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } xd_dl_dtype;
    typedef struct {
        void *data; xd_dl_device device; int32_t ndim; xd_dl_dtype dtype;
        int64_t *shape; int64_t *strides; uint64_t byte_offset;
    } xd_dl_tensor;
    typedef struct xd_dl_managed {
        xd_dl_tensor tensor; void *manager; void (*deleter)(struct xd_dl_managed *);
    } xd_dl_managed;
    typedef struct xd_dl_versioned {
        uint32_t major, minor; void *manager; void (*deleter)(struct xd_dl_versioned *);
        uint64_t flags; xd_dl_tensor tensor;
    } xd_dl_versioned;
    _Static_assert(sizeof(xd_dl_tensor) == 48, "DLTensor");
    _Static_assert(sizeof(xd_dl_managed) == 64, "DLManagedTensor");
    _Static_assert(sizeof(xd_dl_versioned) == 80, "DLManagedTensorVersioned");
    """
    ctypedef struct xd_dl_device:
        int device_type
        int device_id
    ctypedef struct xd_dl_dtype:
        unsigned char code
        unsigned char bits
        unsigned short lanes
    ctypedef struct xd_dl_tensor:
        void *data
        xd_dl_device device
        int ndim
        xd_dl_dtype dtype
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct xd_dl_managed:
        xd_dl_tensor tensor
        void *manager
        void (*deleter)(xd_dl_managed *) noexcept
    ctypedef struct xd_dl_versioned:
        unsigned major
        unsigned minor
        void *manager
        void (*deleter)(xd_dl_versioned *) noexcept
        uint64_t flags
        xd_dl_tensor tensor
