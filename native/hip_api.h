/*
 * The part of the HIP API that the HIP driver uses, written down by us: no vendor header is needed to build.
 * tests/unit/test_vendor_headers.py compares all of it with the vendor's own headers.
 */
#ifndef XDEV_HIP_API_H
#define XDEV_HIP_API_H

#include <stddef.h>
#include <stdint.h>

typedef int hip_result; /* hipError_t */
typedef struct hip_stream_s *hip_stream;
typedef struct hip_event_s *hip_event;
typedef struct hip_graph_s *hip_graph;
typedef struct hip_graph_exec_s *hip_graph_exec;
typedef void (*hip_host_function)(void *arg);

typedef struct hip_uuid {
    char bytes[16];
} hip_uuid;

enum { /* hipError_t */
    HIP_SUCCESS = 0,
    HIP_INVALID_VALUE = 1,
    HIP_OUT_OF_MEMORY = 2,
    HIP_DEINITIALIZED = 4,
    HIP_INVALID_PITCH = 12,
    HIP_INVALID_DEVICE_POINTER = 17,
    HIP_INVALID_DIRECTION = 21,
    HIP_INSUFFICIENT_DRIVER = 35,
    HIP_NO_DEVICE = 100,
    HIP_INVALID_DEVICE = 101,
    HIP_ECC_UNCORRECTABLE = 214,
    HIP_PEER_ACCESS_UNSUPPORTED = 217,
    HIP_OPERATING_SYSTEM = 304,
    HIP_INVALID_HANDLE = 400,
    HIP_NOT_READY = 600,
    HIP_ILLEGAL_ADDRESS = 700,
    HIP_LAUNCH_TIMEOUT = 702,
    HIP_PEER_ACCESS_ALREADY_ENABLED = 704,
    HIP_PEER_ACCESS_NOT_ENABLED = 705,
    HIP_CONTEXT_IS_DESTROYED = 709,
    HIP_ASSERT = 710,
    HIP_LAUNCH_FAILED = 719,
    HIP_NOT_SUPPORTED = 801,
    HIP_STREAM_CAPTURE_UNSUPPORTED = 900, /* the first of those about captures */
    HIP_STREAM_CAPTURE_WRONG_THREAD = 908, /* the last */
};

enum { /* hipDeviceAttribute_t; CUDA's numbers are others */
    HIP_ATTRIBUTE_COPY_ENGINES = 2,
    HIP_ATTRIBUTE_INTEGRATED = 16,
    HIP_ATTRIBUTE_MAJOR = 23,
    HIP_ATTRIBUTE_MINOR = 61,
};

enum { HIP_PORTABLE = 1, HIP_COHERENT = 0x40000000 }; /* of hipHostMalloc */
enum { HIP_NON_BLOCKING = 1 };                        /* of hipStreamCreateWithPriority */
enum { HIP_WITHOUT_TIMING = 2 };                      /* of hipEventCreateWithFlags */
enum { HIP_CAPTURE_THREAD_LOCAL = 1 };                /* of hipStreamBeginCapture */
enum { HIP_CAPTURE_NONE = 0 };                        /* of hipStreamIsCapturing */
enum { HIP_HOST_TO_DEVICE = 1, HIP_DEVICE_TO_HOST = 2, HIP_DEVICE_TO_DEVICE = 3 }; /* hipMemcpyKind */

/* What a pitch may be on every device. */
#define HIP_MAX_PITCH INT32_MAX

/* hipDeviceProp_t up to the name of the architecture, with room for whatever a version has behind it. The layout of
   HIP 6.0 and later has a function of its own; the one before it is that of HIP 5. */
typedef union hip_properties {
    struct {
        char before[1160];
        char arch[256];
    } r0600;
    struct {
        char before[396];
        char arch[256];
    } r0000;
    char room[8192];
} hip_properties;

/* result, name, optional, parameters. HIP keeps one signature per name. All but the optional ones are in HIP 5.3. */
#define HIP_ENTRY_POINTS(X)                                                                              \
    X(const char *, hipGetErrorName, 0, (hip_result))                                                    \
    X(const char *, hipGetErrorString, 0, (hip_result))                                                  \
    X(hip_result, hipGetLastError, 0, (void))                                                            \
    X(hip_result, hipGetDeviceCount, 0, (int *))                                                         \
    X(hip_result, hipDeviceGetName, 0, (char *, int, int))                                               \
    X(hip_result, hipDeviceGetUuid, 0, (hip_uuid *, int))                                                \
    X(hip_result, hipDeviceGetPCIBusId, 0, (char *, int, int))                                           \
    X(hip_result, hipDeviceTotalMem, 0, (size_t *, int))                                                 \
    X(hip_result, hipDeviceGetAttribute, 0, (int *, int, int))                                           \
    X(hip_result, hipGetDevicePropertiesR0600, 1, (hip_properties *, int))                               \
    X(hip_result, hipGetDeviceProperties, 1, (hip_properties *, int))                                    \
    X(hip_result, hipDeviceCanAccessPeer, 0, (int *, int, int))                                          \
    X(hip_result, hipDevicePrimaryCtxGetState, 0, (int, unsigned *, int *))                              \
    X(hip_result, hipGetDevice, 0, (int *))                                                              \
    X(hip_result, hipSetDevice, 0, (int))                                                                \
    X(hip_result, hipDeviceSynchronize, 0, (void))                                                       \
    X(hip_result, hipDeviceEnablePeerAccess, 0, (int, unsigned))                                         \
    X(hip_result, hipMemGetInfo, 0, (size_t *, size_t *))                                                \
    X(hip_result, hipMalloc, 0, (void **, size_t))                                                       \
    X(hip_result, hipFree, 0, (void *))                                                                  \
    X(hip_result, hipHostMalloc, 0, (void **, size_t, unsigned))                                         \
    X(hip_result, hipHostFree, 0, (void *))                                                              \
    X(hip_result, hipStreamCreateWithPriority, 0, (hip_stream *, unsigned, int))                         \
    X(hip_result, hipStreamDestroy, 0, (hip_stream))                                                     \
    X(hip_result, hipStreamQuery, 0, (hip_stream))                                                       \
    X(hip_result, hipStreamWaitEvent, 0, (hip_stream, hip_event, unsigned))                              \
    X(hip_result, hipEventCreateWithFlags, 0, (hip_event *, unsigned))                                   \
    X(hip_result, hipEventDestroy, 0, (hip_event))                                                       \
    X(hip_result, hipEventRecord, 0, (hip_event, hip_stream))                                            \
    X(hip_result, hipEventQuery, 0, (hip_event))                                                         \
    X(hip_result, hipEventElapsedTime, 0, (float *, hip_event, hip_event))                               \
    X(hip_result, hipMemcpyHtoDAsync, 0, (void *, const void *, size_t, hip_stream))                     \
    X(hip_result, hipMemcpyDtoHAsync, 0, (void *, void *, size_t, hip_stream))                           \
    X(hip_result, hipMemcpyDtoDAsync, 0, (void *, void *, size_t, hip_stream))                           \
    X(hip_result, hipMemcpyPeerAsync, 0, (void *, int, const void *, int, size_t, hip_stream))           \
    X(hip_result, hipMemcpy2DAsync, 0,                                                                   \
      (void *, size_t, const void *, size_t, size_t, size_t, int, hip_stream))                           \
    X(hip_result, hipMemsetD8Async, 0, (void *, unsigned char, size_t, hip_stream))                      \
    X(hip_result, hipLaunchHostFunc, 0, (hip_stream, hip_host_function, void *))                         \
    X(hip_result, hipStreamIsCapturing, 0, (hip_stream, unsigned *))                                     \
    X(hip_result, hipStreamBeginCapture, 0, (hip_stream, int))                                           \
    X(hip_result, hipStreamEndCapture, 0, (hip_stream, hip_graph *))                                     \
    X(hip_result, hipGraphInstantiateWithFlags, 0, (hip_graph_exec *, hip_graph, unsigned long long))    \
    X(hip_result, hipGraphDestroy, 0, (hip_graph))                                                       \
    X(hip_result, hipGraphLaunch, 0, (hip_graph_exec, hip_stream))                                       \
    X(hip_result, hipGraphExecDestroy, 0, (hip_graph_exec))

#define HIP_MEMBER(result, name, optional, parameters) result(*name) parameters;
typedef struct hip_entry_points {
    HIP_ENTRY_POINTS(HIP_MEMBER)
} hip_entry_points;
#undef HIP_MEMBER

#endif
