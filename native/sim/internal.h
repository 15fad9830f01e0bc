/* What the files of the simulator share. Everything here is used with sim.lock held, unless it says otherwise. */
#ifndef XDEV_SIM_INTERNAL_H
#define XDEV_SIM_INTERNAL_H

#include "sim.h"

#include <pthread.h>
#include <stdbool.h>

typedef struct sim sim;
typedef struct sim_op sim_op;
typedef struct sim_stream sim_stream;
typedef struct sim_stamp sim_stamp;
typedef struct sim_graph sim_graph;

/* ---- handles (handle.c): what callers hold; a wrong or stale one is found out without touching it ---- */

typedef struct sim_slot { void *object; uint32_t generation; uint32_t next_free; } sim_slot;
typedef struct sim_table { sim_slot *slots; uint32_t count, capacity, first_free; uint32_t kind; } sim_table;

void sim_table_init(sim_table *table, uint32_t kind);
void sim_table_clear(sim_table *table);
int sim_table_add(sim_table *table, void *object, void **handle); /* XD_OK or XD_NO_HOST_MEMORY */
void *sim_table_find(const sim_table *table, const void *handle); /* NULL: not one of ours */
void sim_table_remove(sim_table *table, const void *handle);

/* ---- the ordering checker (order.c); all of it does nothing unless it is switched on ---- */

#define SIM_HOST 0u         /* the host among those who order work; streams count from 1 */
#define SIM_VIOLATIONS 64

typedef struct sim_clock { uint64_t *at; uint32_t count; } sim_clock; /* missing ones are 0 */

typedef struct sim_note { /* who made an access, and when */
    int refs;
    uint32_t who;
    uint64_t when;
    uint64_t seq;
    uint32_t stream;
    int device;
    char label[48];
} sim_note;

typedef struct sim_piece { /* from the end of the piece before */
    uint64_t end;
    sim_note *writer;
    sim_note **readers; /* since that write */
    uint32_t reader_count, reader_capacity;
} sim_piece;

typedef struct sim_pieces { sim_piece *at; size_t count, capacity; } sim_pieces; /* none: never touched */

typedef struct sim_order {
    sim_clock host;
    uint32_t members;
    bool blind, said_blind, away;
    xd_error violations[SIM_VIOLATIONS];
    struct { uint64_t old, new; uint32_t old_who, new_who; } pairs[SIM_VIOLATIONS];
    size_t count, raised, found;
} sim_order;

void sim_order_stream(sim *s, sim_stream *stream);
void sim_order_submit(sim *s, const sim_op *op, const xd_range *ranges, size_t range_count);
void sim_order_record(sim *s, sim_stream *stream, sim_stamp *stamp);
void sim_order_wait(sim *s, sim_stream *stream, const sim_stamp *stamp);
void sim_order_seen(sim *s, const sim_clock *clock); /* the host has seen that work done */
void sim_order_drained(sim *s, int device);          /* and all of the device's streams, XD_HOST: of all */
void sim_order_host(sim *s, uint64_t address, uint64_t bytes, bool write, const char *label);
int sim_order_raise(sim *s, xd_error *err); /* the next violation nobody was told of */
void sim_pieces_clear(sim_pieces *pieces);

/* ---- memory (memory.c) ---- */

typedef struct sim_block {
    uint64_t address, bytes;
    uint64_t id;
    int device;       /* or XD_HOST */
    int foreign;      /* somebody else's memory: not unmapped */
    int pageable;     /* host memory that counts against no budget */
    int freed;        /* freed by the caller; kept for the work queued before */
    uint64_t last_op; /* freed: the newest operation that may still use it */
    sim_pieces pieces;
} sim_block;

typedef struct sim_memory { sim_block *blocks; size_t count, capacity, freed; uint64_t next_id; } sim_memory;

/* Lies [address, address + bytes) in one live block of the device? Operations pass their number, new calls UINT64_MAX. */
int sim_memory_check(const sim *s, int device, uint64_t address, uint64_t bytes, uint64_t seq, const char *operation,
                     xd_error *err);
sim_block *sim_block_at(const sim_memory *memory, uint64_t address); /* NULL: nothing is there */
void sim_memory_clear(sim *s);

int sim_device_alloc(xd_driver *driver, int device, uint64_t bytes, uint64_t *address, xd_error *err);
int sim_device_free(xd_driver *driver, int device, uint64_t address, xd_error *err);
int sim_host_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err);
int sim_pageable_alloc(xd_driver *driver, uint64_t bytes, void **address, xd_error *err);
int sim_host_free(xd_driver *driver, void *address, xd_error *err);

/* ---- operations (queue.c), events (event.c), the calls that queue work (work.c) ---- */

/* What an event stood for when it was recorded. Held by the event, the record and every wait. */
struct sim_stamp {
    int refs;
    int device;
    bool done;
    bool lost;          /* its device failed first: it will never come */
    uint64_t time;      /* when done */
    sim_stream *stream; /* until done or lost */
    sim_op *waiters;
    uint64_t after;     /* the last operation on an engine before it, 0: none */
    sim_clock clock;    /* for the checker */
};

typedef struct sim_event { int device, timing; sim_stamp *stamp; } sim_event;

typedef struct sim_engine { /* the head is running, the others wait in turn */
    sim_op *head, *tail;
    int kind, device, peer; /* for the trace */
} sim_engine;

struct sim_stream {
    int device;
    bool closed;
    uint32_t id;
    sim_op *head, *tail;
    sim_stream *next; /* all of the simulator */

    uint64_t last;    /* newest operation on an engine */
    uint64_t after, after_time; /* what its waits since the last one brought: the latest, and when */
    uint32_t who;     /* for the checker */
    sim_clock clock;
    sim_graph *capture; /* what is queued goes there; NULL: it is queued */
};

enum { SIM_COPY, SIM_FILL, SIM_KERNEL, SIM_RECORD, SIM_WAIT };
enum { SIM_QUEUED, SIM_READY, SIM_DATA, SIM_RUNNING, SIM_STUCK };

struct sim_op {
    int kind, state;
    sim_stream *stream;
    sim_op *next;          /* in its stream */
    sim_op *next_waiter;   /* of a stamp */
    uint64_t seq;
    uint64_t submitted, start;

    uint64_t at;           /* the next point in time at which something happens to it */
    size_t heap;           /* its place in the heap, or SIM_NO_PLACE */

    sim_engine *engines[2];
    sim_op *engine_next[2];
    int engine_count;

    struct sim_fault *spoiler; /* what happens to its bytes */
    bool hangs, loses;

    uint64_t duration;     /* besides the data phase */
    bool late;             /* its bytes move at its end, not at its start */

    /* the data phase of a copy over the host bus */
    bool on_bus, satisfied;
    uint64_t cap, share;   /* bytes a second: the most it can use, what it has */
    uint64_t since;        /* left is right for this time */
    unsigned __int128 left; /* bytes times 1e9 */
    sim_op *flow_next;

    uint64_t bytes;
    uint64_t after;
    union {
        xd_transfer transfer;
        struct { uint64_t address; int byte; } fill;
        struct { int (*run)(void *); void (*drop)(void *); void *arg; } kernel;
        sim_stamp *stamp;
    } u;
    char label[48];
};

#define SIM_NO_PLACE SIZE_MAX

int sim_stream_create(xd_driver *driver, int device, void **stream, xd_error *err);
int sim_stream_destroy(xd_driver *driver, int device, void *stream, xd_error *err);
int sim_stream_query(xd_driver *driver, int device, void *stream, int *idle, xd_error *err);
int sim_stream_wait(xd_driver *driver, int device, void *stream, void *event, xd_error *err);
int sim_event_create(xd_driver *driver, int device, int timing, void **event, xd_error *err);
int sim_event_destroy(xd_driver *driver, int device, void *event, xd_error *err);
int sim_event_record(xd_driver *driver, int device, void *event, void *stream, xd_error *err);
int sim_event_query(xd_driver *driver, int device, void *event, int *done, xd_error *err);
int sim_event_wait(xd_driver *driver, int device, void *event, uint64_t timeout, int *done, xd_error *err);
int sim_event_elapsed(xd_driver *driver, int device, void *begin, void *end, double *seconds, xd_error *err);
int sim_copy(xd_driver *driver, int device, void *stream, const xd_transfer *transfer, xd_error *err);
int sim_fill(xd_driver *driver, int device, void *stream, uint64_t address, int byte, uint64_t bytes, xd_error *err);
int sim_launch(xd_driver *driver, int device, void *stream, const xd_kernel *kernel, xd_error *err);

/* The device works and the stream is one of its own. */
int sim_enter(sim *s, int device, void *handle, const char *operation, sim_stream **out, xd_error *err);
int sim_find_event(sim *s, const void *handle, const char *operation, sim_event **out, xd_error *err);
int sim_find_event_of(sim *s, int device, const void *handle, const char *operation, sim_event **out, xd_error *err);
sim_op *sim_new_op(sim *s, int kind, sim_stream *stream, const char *operation, xd_error *err);
sim_stamp *sim_new_stamp(sim *s, sim_stream *stream); /* two references: an operation's and one more */
void sim_append(sim *s, sim_op *op, uint64_t cost);
/* Waits until what is queued on the stream is done, or nothing more can be. */
int sim_block_on(sim *s, sim_stream *stream, const char *operation, xd_error *err);
void sim_stamp_release(sim_stamp *stamp);
void sim_op_free(sim_op *op); /* calls nobody: a kernel's drop has been called or taken out before */
void sim_stream_forget(sim *s, sim_stream *stream); /* frees a closed stream without work */
void sim_streams_clear(sim *s); /* at close: drops what never ran */

/* ---- graphs (graph.c) ---- */

int sim_capture_begin(xd_driver *driver, int device, void *stream, xd_error *err);
int sim_capture_end(xd_driver *driver, int device, void *stream, void **graph, xd_error *err);
int sim_graph_launch(xd_driver *driver, int device, void *graph, void *stream, xd_error *err);
int sim_graph_destroy(xd_driver *driver, int device, void *graph, xd_error *err);
/* Queues a copy, fill or kernel, or records it if the stream captures. Takes op over unless it fails. */
int sim_submit(sim *s, sim_op *op, uint64_t cost, const xd_range *ranges, size_t range_count, xd_error *err);
/* XD_INVALID for what a captured stream must not be asked for; the capture is spoiled. */
int sim_refuse_capture(const sim_stream *stream, const char *operation, xd_error *err);
/* The same for calls that a thread which captures anything must not make. */
int sim_refuse_here(const sim *s, const char *operation, xd_error *err);
void sim_graph_release(sim_graph *graph); /* may call out: without the lock, or while nobody else is left */

/* ---- time (clock.c) ---- */

typedef struct sim_heap { sim_op **ops; size_t count, capacity; } sim_heap;

int sim_heap_reserve(sim *s, size_t ops); /* room for so many live operations */
void sim_schedule(sim *s, sim_op *op, uint64_t at); /* also moves an operation that is scheduled already */

/* What a caller waits for: any field may be empty. */
typedef struct sim_goal {
    const sim_stamp *stamp;
    bool drain;           /* the operations up to last_op of the device (XD_HOST: of all) */
    int device;
    uint64_t last_op;
} sim_goal;

bool sim_reached(const sim *s, const sim_goal *goal);
/* Runs until the goal is reached or nothing is left up to `limit`; XD_INVALID inside a kernel. */
int sim_run(sim *s, const sim_goal *goal, uint64_t limit, const char *operation, xd_error *err);
/* Runs up to the host's clock, unless somebody else is running. */
void sim_catch_up(sim *s);
bool sim_in_callback(const sim *s);
/* The fault of the device that keeps the stamp from ever coming, NULL if there is none. */
const xd_error *sim_blocking_fault(const sim *s, const sim_stamp *stamp);

/* ---- what operations do (engine.c), and the bus they share (bus.c) ---- */

#define SIM_SECOND UINT64_C(1000000000)

/* A point of time of the operation has come. May call out, with the lock released. */
void sim_step(sim *s, sim_op *op);
void sim_route(sim *s, sim_op *op); /* which engines a new operation uses, and for how long */
void sim_bus_join(sim *s, sim_op *op);
void sim_bus_leave(sim *s, sim_op *op);

/* ---- faults (faults.c) ---- */

typedef struct sim_patch { uint64_t address, bytes; unsigned char *data; struct sim_patch *next; } sim_patch;

typedef struct sim_fault {
    xd_sim_fault is;
    uint64_t seen;           /* operations that it fits */
    unsigned char *last;     /* stale: what the copy before should have brought */
    uint64_t last_bytes;
    sim_patch *patches;      /* mirror: oldest first */
} sim_fault;

/* One more operation of this kind: the fault that hits it, NULL for none. */
sim_fault *sim_fault_hits(sim *s, int kind, int from, int to);
void sim_fault_assign(sim *s, sim_op *op); /* which faults hit a new operation on an engine */
/* Moves the bytes of a copy as its spoiler wants, and through the mirrors of the device that reads. */
void sim_deliver(sim *s, const sim_op *op);
int sim_faults_open(sim *s, const xd_sim_config *config, xd_error *err);
void sim_faults_clear(sim *s);

/* ---- the trace (trace.c) ---- */

typedef struct sim_trace { xd_sim_span *spans; size_t count, capacity; } sim_trace;

void sim_trace_op(sim *s, const sim_op *op);
void sim_trace_host(sim *s, const char *label, uint64_t start, uint64_t end);

/* ---- the simulator (sim.c) ---- */

typedef struct sim_device {
    xd_sim_device is;
    uint64_t used;
    int enabled; /* peers */
    sim_engine compute, in, out;
    xd_error fault; /* status XD_OK while it works */
} sim_device;

struct sim {
    xd_driver driver;
    pthread_mutex_t lock;
    pthread_cond_t idle; /* nobody is running */
    bool running, calling;
    pthread_t runner;

    int device_count;
    sim_device *devices;
    xd_sim_peer *peers;
    bool *peer_on;
    sim_engine *links; /* by ordered pair */
    xd_sim_config config; /* its pointers are not used */

    uint64_t host; /* the host's clock */
    uint64_t now;  /* simulated so far; never beyond host */
    uint64_t seq;  /* of the newest operation */
    size_t live_ops;
    uint32_t next_stream;
    uint32_t captures; /* streams that capture */
    sim_stream *streams;
    sim_table stream_table, event_table, graph_table;
    sim_heap heap;
    sim_op *flows; /* copies on the host bus */
    sim_memory memory;
    uint64_t pinned_used;
    sim_fault *faults;
    size_t fault_count;
    bool mirrors; /* some copy may have to look into a mirror */
    sim_order order;
    sim_trace trace;
};

static inline sim *sim_of(xd_driver *driver) { return (sim *)driver; }

/* The device by number, if it is there and works. */
int sim_device_find(sim *s, int device, const char *operation, sim_device **out, xd_error *err);
int sim_pass_on(xd_error *err, const xd_error *from); /* copies the error and returns its status */
uint64_t sim_draw(const sim *s, uint64_t seq, uint64_t purpose); /* seeded; the same for the same operation */

#endif
