/*
 * Simulated devices: a driver (see driver.h) over host memory, in virtual time.
 *
 * Calls append to queues and move the host's clock by their declared cost. Nothing runs until somebody waits or asks;
 * then operations run in order of virtual time, never beyond the host's clock. Times are integer nanoseconds and depend
 * on the configuration and the calls alone.
 */
#ifndef XDEV_SIM_H
#define XDEV_SIM_H

#include "../driver.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rates are bytes a second, times nanoseconds. */

typedef struct xd_sim_device {
    const char *name, *arch;
    uint64_t memory;              /* bytes; counted, not backed */
    uint64_t memory_rate;         /* fills and copies within the device; they use the compute engine */
    uint64_t up_rate, down_rate;  /* host to device, device to host */
    uint64_t latency;             /* of each copy and fill, besides its bytes */
    int integrated;
} xd_sim_device;

enum { XD_SIM_LINK = 0, XD_SIM_OVER_HOST_BUS = 1 };

typedef struct xd_sim_peer { /* one ordered pair; a pair that is not capable needs the rest only if it is "unpeered" */
    int capable;
    int route;                /* a link of its own, or the copy engines of both and the host bus */
    uint64_t rate, latency;
} xd_sim_peer;

typedef struct xd_sim_costs { /* time of the submitting thread for each call */
    uint64_t copy, fill, launch, record, wait, query;
    uint64_t sync;  /* from the end of what was waited for until the thread goes on */
    uint64_t alloc; /* device and page-locked memory */
} xd_sim_costs;

/* What a copy between two devices without peer access does. */
enum { XD_SIM_UNPEERED_REFUSED = 0, XD_SIM_UNPEERED_BLOCKS = 1 };

/* ---- faults ---- */

#define XD_SIM_ANY (-2)

/* name, what `value` is. The first group spoils the bytes of copies from `from` to `to`; the second the order of streams
   of `to` behind events of `from`; the rest names devices, or pairs for peer access. */
#define XD_SIM_FAULTS(X)                                                                                 \
    X(DROP, drop)           /* the bytes never arrive */                                                 \
    X(ZERO, zero)           /* zeros arrive */                                                           \
    X(MIRROR, mirror)       /* they arrive where only the writing device sees them */                    \
    X(STALE, stale)         /* those of the copy before arrive; the first time none */                   \
    X(SWAP, swap)           /* the first two tiles change places; value: tile size */                    \
    X(FLIP, flip)           /* one byte arrives inverted; value: its offset */                           \
    X(TRUNCATE, truncate)   /* the size is taken modulo the value */                                     \
    X(OVERRUN, overrun)     /* one byte more is written */                                               \
    X(ALIAS, alias)         /* after each `value` bytes the source is read from its beginning again */   \
    X(HANG_COPY, hang_copy) /* never ends */                                                             \
    X(BLOCK_COPY, block_copy)   /* the call waits for the copy */                                        \
    X(IGNORE_WAIT, ignore_wait) /* the stream does not wait */                                           \
    X(BLOCK_WAIT, block_wait)   /* the call waits, not the stream */                                     \
    X(EARLY_EVENT, early_event) /* events of `from` are done when they are recorded */                   \
    X(SLOW_KERNEL, slow_kernel) /* kernels of `from` take `value` times as long */                       \
    X(HANG_KERNEL, hang_kernel) /* kernels of `from` never end */                                        \
    X(LOSE_DEVICE, lose_device) /* the device `from` fails while it runs an operation */                 \
    X(ENABLE_FAILS, enable_fails)       /* peer access of `from` to `to` is offered and then refused */  \
    X(ALREADY_ENABLED, already_enabled) /* somebody else has enabled it */                               \
    X(NOT_READY, not_ready)             /* opening finds no device */

enum {
#define XD_SIM_FAULT_KIND(name, text) XD_SIM_##name,
    XD_SIM_FAULTS(XD_SIM_FAULT_KIND)
#undef XD_SIM_FAULT_KIND
    XD_SIM_FAULT_KINDS
};

typedef struct xd_sim_fault {
    int kind;
    int from, to;   /* device, XD_HOST or XD_SIM_ANY */
    uint64_t first; /* of the operations it fits, in order of submission, from 1 on */
    uint64_t count; /* 0: all from then on */
    uint64_t value;
} xd_sim_fault;

const char *xd_sim_fault_name(int kind); /* "drop"; NULL: there is none */

/* ---- the machine ---- */

typedef struct xd_sim_config {
    int device_count;
    const xd_sim_device *devices;
    const xd_sim_peer *peers; /* [device * device_count + peer] */
    int peer_limit;           /* peers a device can enable; -1: no limit */
    int unpeered;
    uint64_t pinned;          /* bytes of page-locked memory; counted, not backed */
    uint64_t bus_rate;        /* all copies between host and devices together; 0: no limit */
    uint64_t hop;             /* from an event on one device to a stream of another that waits for it */
    xd_sim_costs costs;
    uint64_t seed;            /* decides for each operation whether its bytes move at its start or at its end */
    uint64_t jitter;          /* thousandths: durations grow by up to this part, seeded */
    uint64_t delay;           /* ns: every operation on an engine takes up to this much longer, seeded */
    const xd_sim_fault *faults;
    size_t fault_count;
    int check;                /* 1: the ordering checker watches; see order.c */
    int trace;                /* 1: finished operations are kept */
} xd_sim_config;

/* Strings and arrays of the configuration are copied. */
int xd_sim_create(xd_driver **out, const xd_sim_config *config, xd_error *err);

/* Somebody else's memory becomes page-locked memory of these devices, until host_free; for stand-ins of a vendor's
   library. */
int xd_sim_adopt(xd_driver *sim, void *address, uint64_t bytes, xd_error *err);

/* The submitting thread does something else for so long. */
void xd_sim_pass(xd_driver *sim, uint64_t ns);

/* ---- what the ordering checker has found ---- */

/* Each violation is raised once, as XD_ORDER by the next call that waits or asks and gives an err. All of them so far, the
   oldest first; the texts of the first 64 are kept. Returns how many there are. */
size_t xd_sim_violations(xd_driver *sim, xd_error *out, size_t room);

/* 0: says nothing about what comes from now on, for a race on purpose; 1: does so again. */
void xd_sim_watch(xd_driver *sim, int on);

/* ---- the trace ---- */

enum { XD_SIM_ON_HOST, XD_SIM_ON_COMPUTE, XD_SIM_ON_IN, XD_SIM_ON_OUT, XD_SIM_ON_LINK };

typedef struct xd_sim_span { /* what an engine, or the host, did for a while */
    int engine;
    int device;         /* whose engine; a link's source; XD_HOST for the host */
    int peer;           /* a link's destination; otherwise XD_HOST */
    uint64_t operation; /* in order of submission; 0: the host */
    uint64_t after;     /* the operation of another stream that it waited for last; 0: none */
    uint32_t stream;
    uint64_t submitted, start, end;
    uint64_t bytes;
    char label[48];
} xd_sim_span;

/* Finished so far, in the order in which they ended; from `first` on. Returns how many there are in all. */
size_t xd_sim_trace(xd_driver *sim, xd_sim_span *out, size_t first, size_t room);

#ifdef __cplusplus
}
#endif
#endif
