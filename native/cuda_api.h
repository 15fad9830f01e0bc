/*
 * The part of CUDA's driver API that the CUDA driver uses, written down by us: no vendor header is needed to build.
 * tests/unit/test_vendor_headers.py compares all of it with the vendor's own headers.
 */
#ifndef XDEV_CUDA_API_H
#define XDEV_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* CUresult */
typedef int cu_device; /* CUdevice */
typedef unsigned long long cu_address; /* CUdeviceptr */
typedef struct cu_context_s *cu_context;
typedef struct cu_stream_s *cu_stream;
typedef struct cu_event_s *cu_event;
typedef struct cu_graph_s *cu_graph;
typedef struct cu_graph_exec_s *cu_graph_exec;
typedef void (*cu_host_function)(void *arg);

typedef struct cu_uuid {
    char bytes[16];
} cu_uuid;

enum { /* CUresult */
    CU_SUCCESS = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_DEINITIALIZED = 4,
    CU_STUB_LIBRARY = 34,
    CU_DEVICE_UNAVAILABLE = 46,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_INVALID_CONTEXT = 201,
    CU_ECC_UNCORRECTABLE = 214,
    CU_PEER_ACCESS_UNSUPPORTED = 217,
    CU_NVLINK_UNCORRECTABLE = 220,
    CU_CONTAINED = 226,
    CU_OPERATING_SYSTEM = 304,
    CU_INVALID_HANDLE = 400,
    CU_NOT_READY = 600,
    CU_ILLEGAL_ADDRESS = 700,
    CU_LAUNCH_TIMEOUT = 702,
    CU_PEER_ACCESS_ALREADY_ENABLED = 704,
    CU_PEER_ACCESS_NOT_ENABLED = 705,
    CU_CONTEXT_IS_DESTROYED = 709,
    CU_ASSERT = 710,
    CU_TOO_MANY_PEERS = 711,
    CU_HARDWARE_STACK_ERROR = 714,
    CU_ILLEGAL_INSTRUCTION = 715,
    CU_MISALIGNED_ADDRESS = 716,
    CU_INVALID_ADDRESS_SPACE = 717,
    CU_INVALID_PC = 718,
    CU_LAUNCH_FAILED = 719,
    CU_TENSOR_MEMORY_LEAK = 721,
    CU_NOT_SUPPORTED = 801,
    CU_SYSTEM_NOT_READY = 802,
    CU_SYSTEM_DRIVER_MISMATCH = 803,
    CU_COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    CU_MPS_CLIENT_TERMINATED = 810,
    CU_STREAM_CAPTURE_UNSUPPORTED = 900, /* the first of those about captures */
    CU_STREAM_CAPTURE_INVALIDATED = 901,
    CU_STREAM_CAPTURE_WRONG_THREAD = 908, /* the last */
};

enum { /* CUdevice_attribute */
    CU_ATTRIBUTE_INTEGRATED = 18,
    CU_ATTRIBUTE_COPY_ENGINES = 40,
    CU_ATTRIBUTE_MAJOR = 75,
    CU_ATTRIBUTE_MINOR = 76,
};

enum { CU_PORTABLE = 1 };           /* of cuMemHostAlloc */
enum { CU_REGISTER_PORTABLE = 1 };  /* of cuMemHostRegister */
enum { CU_NON_BLOCKING = 1 };       /* CUstream_flags */
enum { CU_PER_THREAD = 2 };         /* CUstream: the last of the handles that stand for default streams, NULL the first */
enum { CU_WITHOUT_TIMING = 2 };     /* CUevent_flags */
enum { CU_CAPTURE_THREAD_LOCAL = 1 }; /* CUstreamCaptureMode */
enum { CU_CAPTURE_NONE = 0 };         /* CUstreamCaptureStatus */
enum { CU_MEMORY_HOST = 1, CU_MEMORY_DEVICE = 2 }; /* CUmemorytype */

/* CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device */
#define CUDA_MAX_PITCH INT32_MAX

typedef struct cu_copy_2d { /* CUDA_MEMCPY2D */
    size_t src_x, src_y;
    int src_type;
    const void *src_host;
    cu_address src_device;
    void *src_array;
    size_t src_pitch;
    size_t dst_x, dst_y;
    int dst_type;
    void *dst_host;
    cu_address dst_device;
    void *dst_array;
    size_t dst_pitch;
    size_t width, height;
} cu_copy_2d;

typedef struct cu_copy_3d_peer { /* CUDA_MEMCPY3D_PEER */
    size_t src_x, src_y, src_z, src_lod;
    int src_type;
    const void *src_host;
    cu_address src_device;
    void *src_array;
    cu_context src_context;
    size_t src_pitch, src_height;
    size_t dst_x, dst_y, dst_z, dst_lod;
    int dst_type;
    void *dst_host;
    cu_address dst_device;
    void *dst_array;
    cu_context dst_context;
    size_t dst_pitch, dst_height;
    size_t width, height, depth;
} cu_copy_3d_peer;

/* base name, version to ask of cuGetProcAddress, optional, parameters. The version picks the signature written here;
   none is above 12000, so that every driver since CUDA 12.0 answers. */
#define CUDA_ENTRY_POINTS(X)                                                                              \
    X(cuGetErrorName, 6000, 0, (cu_result, const char **))                                                \
    X(cuGetErrorString, 6000, 0, (cu_result, const char **))                                              \
    X(cuInit, 2000, 0, (unsigned))                                                                        \
    X(cuDeviceGetCount, 2000, 0, (int *))                                                                 \
    X(cuDeviceGet, 2000, 0, (cu_device *, int))                                                           \
    X(cuDeviceGetName, 2000, 0, (char *, int, cu_device))                                                 \
    X(cuDeviceGetUuid, 11040, 0, (cu_uuid *, cu_device))                                                  \
    X(cuDeviceGetPCIBusId, 4010, 0, (char *, int, cu_device))                                             \
    X(cuDeviceTotalMem, 3020, 0, (size_t *, cu_device))                                                   \
    X(cuDeviceGetAttribute, 2000, 0, (int *, int, cu_device))                                             \
    X(cuDeviceCanAccessPeer, 4000, 0, (int *, cu_device, cu_device))                                      \
    X(cuDevicePrimaryCtxGetState, 7000, 0, (cu_device, unsigned *, int *))                                \
    X(cuDevicePrimaryCtxRetain, 7000, 0, (cu_context *, cu_device))                                       \
    X(cuDevicePrimaryCtxRelease, 11000, 0, (cu_device))                                                   \
    X(cuCtxGetCurrent, 4000, 0, (cu_context *))                                                           \
    X(cuCtxPushCurrent, 4000, 0, (cu_context))                                                            \
    X(cuCtxPopCurrent, 4000, 0, (cu_context *))                                                           \
    X(cuCtxSynchronize, 2000, 0, (void))                                                                  \
    X(cuCtxEnablePeerAccess, 4000, 0, (cu_context, unsigned))                                             \
    X(cuMemGetInfo, 3020, 0, (size_t *, size_t *))                                                        \
    X(cuMemAlloc, 3020, 0, (cu_address *, size_t))                                                        \
    X(cuMemFree, 3020, 0, (cu_address))                                                                   \
    X(cuMemHostAlloc, 2020, 0, (void **, size_t, unsigned))                                               \
    X(cuMemFreeHost, 2000, 0, (void *))                                                                   \
    X(cuMemHostRegister, 6050, 0, (void *, size_t, unsigned))                                             \
    X(cuMemHostUnregister, 4000, 0, (void *))                                                             \
    X(cuStreamCreateWithPriority, 5050, 0, (cu_stream *, unsigned, int))                                  \
    X(cuStreamDestroy, 4000, 0, (cu_stream))                                                              \
    X(cuStreamQuery, 2000, 0, (cu_stream))                                                                \
    X(cuStreamWaitEvent, 3020, 0, (cu_stream, cu_event, unsigned))                                        \
    X(cuEventCreate, 2000, 0, (cu_event *, unsigned))                                                     \
    X(cuEventDestroy, 4000, 0, (cu_event))                                                                \
    X(cuEventRecord, 2000, 0, (cu_event, cu_stream))                                                      \
    X(cuEventQuery, 2000, 0, (cu_event))                                                                  \
    X(cuEventElapsedTime, 2000, 0, (float *, cu_event, cu_event))                                         \
    X(cuMemcpyHtoDAsync, 3020, 0, (cu_address, const void *, size_t, cu_stream))                          \
    X(cuMemcpyDtoHAsync, 3020, 0, (void *, cu_address, size_t, cu_stream))                                \
    X(cuMemcpyDtoDAsync, 3020, 0, (cu_address, cu_address, size_t, cu_stream))                            \
    X(cuMemcpyPeerAsync, 4000, 0, (cu_address, cu_context, cu_address, cu_context, size_t, cu_stream))    \
    X(cuMemcpy2DAsync, 3020, 0, (const cu_copy_2d *, cu_stream))                                          \
    X(cuMemcpy3DPeerAsync, 4000, 0, (const cu_copy_3d_peer *, cu_stream))                                 \
    X(cuMemsetD8Async, 3020, 0, (cu_address, unsigned char, size_t, cu_stream))                           \
    X(cuLaunchHostFunc, 10000, 0, (cu_stream, cu_host_function, void *))                                  \
    X(cuStreamIsCapturing, 10000, 0, (cu_stream, unsigned *))                                             \
    X(cuStreamBeginCapture, 10010, 0, (cu_stream, int))                                                   \
    X(cuStreamEndCapture, 10000, 0, (cu_stream, cu_graph *))                                              \
    X(cuGraphInstantiateWithFlags, 11040, 0, (cu_graph_exec *, cu_graph, unsigned long long))             \
    X(cuGraphDestroy, 10000, 0, (cu_graph))                                                               \
    X(cuGraphLaunch, 10000, 0, (cu_graph_exec, cu_stream))                                                \
    X(cuGraphExecDestroy, 10000, 0, (cu_graph_exec))

#define CUDA_MEMBER(name, version, optional, parameters) cu_result(*name) parameters;
typedef struct cuda_entry_points {
    CUDA_ENTRY_POINTS(CUDA_MEMBER)
} cuda_entry_points;
#undef CUDA_MEMBER

#endif
