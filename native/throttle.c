/* The bounded in-flight window: a queue of places, each left through the exit event of its microbatch. */
#include "internal.h"

#include <stdlib.h>

enum { LARGEST_LIMIT = 1 << 20 };

typedef struct place {
    xd_event *own;
    xd_event *exit; /* own, or the caller's */
} place;

/* The places in use are head, head + 1, ... (modulo limit). The first `retired` of them have an exit event recorded. */
struct xd_throttle {
    xd_runtime *runtime;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a place was retired or withdrawn */
    uint64_t left;          /* places that have been left so far; tells one head from the next */
    _Atomic uint64_t blocked;
    unsigned limit, head, used, retired;
    place places[];
};

int xd_throttle_open(xd_throttle **out, xd_runtime *runtime, unsigned limit, xd_error *err)
{
    int status = xd_runtime_enter(runtime, "throttle_open", err);
    if (status)
        return status;
    if (!limit || limit > LARGEST_LIMIT)
        return xd_fail(err, XD_INVALID, 0, "throttle_open", "limit is %u; allowed: 1 to %d", limit, LARGEST_LIMIT);
    xd_throttle *throttle = xd_new(sizeof *throttle + limit * sizeof throttle->places[0], "throttle_open", err);
    if (!throttle)
        return XD_NO_HOST_MEMORY;
    throttle->runtime = runtime;
    for (; throttle->limit < limit; throttle->limit++) {
        status = xd_event_open(&throttle->places[throttle->limit].own, runtime, 0, err);
        if (status)
            goto close_exits;
    }
    pthread_mutex_init(&throttle->lock, NULL);
    xd_condition_open(&throttle->changed);
    xd_runtime_count(runtime, XD_LIVE_THROTTLES, 1);
    *out = throttle;
    return XD_OK;

close_exits:
    while (throttle->limit)
        xd_event_close(&throttle->places[--throttle->limit].own);
    free(throttle);
    return status;
}

void xd_throttle_close(xd_throttle **at)
{
    xd_throttle *throttle = at ? *at : NULL;
    if (!throttle)
        return;
    for (unsigned i = 0; i < throttle->limit; i++)
        xd_event_close(&throttle->places[i].own);
    pthread_cond_destroy(&throttle->changed);
    pthread_mutex_destroy(&throttle->lock);
    xd_runtime_count(throttle->runtime, XD_LIVE_THROTTLES, -1);
    free(throttle);
    *at = NULL;
}

static void leave_oldest(xd_throttle *throttle)
{
    throttle->head = (throttle->head + 1) % throttle->limit;
    throttle->used--;
    throttle->retired--;
    throttle->left++;
}

/* Under the lock, which it lets go while it waits. *came is 0 when the time has passed. */
static int wait_for_oldest(xd_throttle *throttle, uint64_t until, uint64_t unretired_until, int *came, xd_error *err)
{
    if (!throttle->retired) {
        *came = xd_condition_wait(&throttle->changed, &throttle->lock, unretired_until);
        return XD_OK;
    }
    uint64_t left = throttle->left;
    xd_event *exit = throttle->places[throttle->head].exit;
    pthread_mutex_unlock(&throttle->lock);
    uint64_t remaining = xd_remaining(xd_runtime_clock(throttle->runtime), until);
    int status = xd_event_wait(exit, remaining, came, err);
    pthread_mutex_lock(&throttle->lock);
    if (!status && *came && throttle->left == left)
        leave_oldest(throttle);
    return status;
}

int xd_throttle_admit(xd_throttle *throttle, uint64_t timeout, int *admitted, xd_error *err)
{
    int status = xd_runtime_enter(throttle->runtime, "throttle_admit", err);
    if (status)
        return status;
    int in_time = 1;
    pthread_mutex_lock(&throttle->lock);
    if (throttle->used == throttle->limit) {
        uint64_t begin = xd_runtime_clock(throttle->runtime);
        uint64_t unretired_until = xd_later(xd_monotonic(), timeout);
        while (!status && in_time && throttle->used == throttle->limit)
            status = wait_for_oldest(throttle, xd_later(begin, timeout), unretired_until, &in_time, err);
        throttle->blocked += xd_runtime_clock(throttle->runtime) - begin;
    }
    int taken = !status && throttle->used < throttle->limit;
    throttle->used += (unsigned)taken;
    pthread_mutex_unlock(&throttle->lock);
    if (!status)
        *admitted = taken;
    return status;
}

/* Records `stream` in the place's own event, or takes `event`, as it was recorded last. */
static int retire(xd_throttle *throttle, xd_stream *stream, xd_event *event, xd_error *err)
{
    int status = xd_runtime_enter(throttle->runtime, "throttle_retire", err);
    if (status)
        return status;
    pthread_mutex_lock(&throttle->lock);
    place *leaving = &throttle->places[(throttle->head + throttle->retired) % throttle->limit];
    if (throttle->retired == throttle->used)
        status = xd_fail(err, XD_INVALID, 0, "throttle_retire", "all of the %u places in use have been retired",
                         throttle->used);
    else if (stream)
        status = xd_event_record(leaving->own, stream, err);
    if (!status) {
        leaving->exit = event ? event : leaving->own;
        throttle->retired++;
        pthread_cond_broadcast(&throttle->changed);
    }
    pthread_mutex_unlock(&throttle->lock);
    return status;
}

int xd_throttle_retire(xd_throttle *throttle, xd_stream *stream, xd_error *err)
{
    return retire(throttle, stream, NULL, err);
}

int xd_throttle_retire_at(xd_throttle *throttle, xd_event *event, xd_error *err)
{
    int status = xd_runtime_check_same(throttle->runtime, event->runtime, "throttle_retire", err);
    return status ? status : retire(throttle, NULL, event, err);
}

void xd_throttle_withdraw(xd_throttle *throttle)
{
    if (!xd_runtime_owned(throttle->runtime))
        return;
    pthread_mutex_lock(&throttle->lock);
    if (throttle->used > throttle->retired) {
        throttle->used--;
        pthread_cond_broadcast(&throttle->changed);
    }
    pthread_mutex_unlock(&throttle->lock);
}

int xd_throttle_in_flight(xd_throttle *throttle, unsigned *count, xd_error *err)
{
    int status = xd_runtime_enter(throttle->runtime, "throttle_in_flight", err);
    if (status)
        return status;
    uint64_t now = xd_runtime_clock(throttle->runtime);
    int came = 1;
    pthread_mutex_lock(&throttle->lock);
    while (!status && came && throttle->retired)
        status = wait_for_oldest(throttle, now, 0, &came, err);
    if (!status)
        *count = throttle->used;
    pthread_mutex_unlock(&throttle->lock);
    return status;
}

uint64_t xd_throttle_blocked(const xd_throttle *throttle)
{
    return throttle->blocked;
}
