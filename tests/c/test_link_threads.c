/* Two threads copy through one link, each its own bytes; a third sends them back through another. */
#include <pthread.h>

#include "check.h"
#include "machine.h"

enum { TILE = 128, BYTES = 3 * TILE + 1, ROUNDS = 60, WORKERS = 3 };

static xd_runtime *runtime;
static xd_link *there, *back;

static void *work(void *arg)
{
    int me = (int)(intptr_t)arg, forward = me < 2;
    xd_error err;
    xd_buffer *src, *dst;
    xd_event *arrived;
    OK(xd_buffer_open(&src, runtime, !forward, BYTES, &err));
    OK(xd_buffer_open(&dst, runtime, forward, BYTES, &err));
    OK(xd_event_open(&arrived, runtime, 0, &err));
    unsigned char *from = (unsigned char *)(uintptr_t)xd_buffer_address(src);
    unsigned char *to = (unsigned char *)(uintptr_t)xd_buffer_address(dst);
    for (int round = 0; round < ROUNDS; round++) {
        int done = 0;
        for (int i = 0; i < BYTES; i++)
            from[i] = (unsigned char)(i * 7 + round * 13 + me * 101);
        OK(xd_link_copy(forward ? there : back,
                        &(xd_copy){.dst = xd_buffer_address(dst), .src = xd_buffer_address(src), .width = BYTES,
                                   .height = 1, .arrived = arrived},
                        &err));
        OK(xd_event_wait(arrived, XD_FOREVER, &done, &err));
        CHECK_EQ(done, 1);
        CHECK_EQ(memcmp(from, to, BYTES), 0);
    }
    xd_event_close(&arrived);
    xd_buffer_close(&src);
    xd_buffer_close(&dst);
    return NULL;
}

int main(void)
{
    xd_error err;
    pthread_t workers[WORKERS];
    xd_link_options options = {.path = XD_STAGED, .tile_bytes = TILE, .tiles = 2, .gate = 1};
    OK(xd_runtime_open(&runtime, machine_jumbled(2, 1), NULL, &err));
    OK(xd_link_open(&there, runtime, 0, 1, &options, &err));
    OK(xd_link_open(&back, runtime, 1, 0, &options, &err));
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_create(&workers[i], NULL, work, (void *)(intptr_t)i), 0);
    for (int i = 0; i < WORKERS; i++)
        CHECK_EQ(pthread_join(workers[i], NULL), 0);
    xd_link_close(&there);
    xd_link_close(&back);
    CHECK_NOTHING_LIVES(runtime);
    OK(xd_runtime_close(&runtime, &err));
    return 0;
}
