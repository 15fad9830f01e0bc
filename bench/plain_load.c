/*
 * Files to devices in the plainest way, for bench/plain.py: what a loader can reach, and what is in its way.
 *
 *     plain_load DEVICES BYTES FILE...
 *
 * DEVICES is a list like 0,1; BYTES is the size of the largest tile to come. It says on a line what contexts and device
 * memory cost, and then answers each line "threads tile depth own_streams wait read upload" with a line of JSON: seconds,
 * and microseconds a tile that a thread spent in each call. Thread t serves device t % devices.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cuda_api.h"

enum { MAX_DEVICES = 8, MAX_FILES = 64, MAX_THREADS = 64, MAX_DEPTH = 64, PARTS = 8 };
#define RING ((size_t)64 << 20)
enum { SPIN, NAP, SYNC }; /* how a thread waits for its tile */

static cuda_entry_points cu;
static cu_result (*cuEventSynchronize)(cu_event);
static cu_result (*cuMemHostRegister)(void *, size_t, unsigned);
static cu_result (*cuMemHostUnregister)(void *);

typedef struct part { /* of a file, for one device */
    int fd;
    off_t offset;
    size_t bytes;
    cu_address to;
} part;

typedef struct lane {
    cu_context context;
    cu_address memory;
    cu_stream shared;
    part *parts;
    size_t count;
    _Atomic size_t next;
} lane;

typedef struct settings {
    int threads, depth, own_streams, wait, read, upload;
    size_t tile;
} settings;

typedef struct worker {
    pthread_t thread;
    const settings *how;
    lane *lane;
    char *memory;
    uint64_t waiting, reading, submitting, recording, tiles;
} worker;

static lane lanes[MAX_DEVICES];
static int files[MAX_FILES];
static size_t sizes[MAX_FILES];
static int lane_count, file_count;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void need(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "plain_load: %s failed\n", what);
    exit(1);
}

#define CU(call) need((call) == CU_SUCCESS, #call)

static void bind(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    need(library != NULL, "dlopen of libcuda.so.1");
    cu_result (*find)(const char *, void **, int, uint64_t, int *);
    *(void **)&find = dlsym(library, "cuGetProcAddress_v2");
    need(find != NULL, "dlsym of cuGetProcAddress_v2");
    int found;
#define BIND(name, version, optional, parameters) CU(find(#name, (void **)&cu.name, version, 0, &found));
    CUDA_ENTRY_POINTS(BIND)
    CU(find("cuEventSynchronize", (void **)&cuEventSynchronize, 2000, 0, &found));
    if (find("cuMemHostRegister", (void **)&cuMemHostRegister, 6050, 0, &found) != CU_SUCCESS ||
        find("cuMemHostUnregister", (void **)&cuMemHostUnregister, 4000, 0, &found) != CU_SUCCESS)
        cuMemHostRegister = NULL;
}

static void wait_event(cu_event event, int how)
{
    if (how == SYNC) {
        CU(cuEventSynchronize(event));
        return;
    }
    cu_result code;
    while ((code = cu.cuEventQuery(event)) == CU_NOT_READY)
        if (how == NAP)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        else
            sched_yield();
    need(code == CU_SUCCESS, "cuEventQuery");
}

static void *work(void *arg)
{
    worker *w = arg;
    const settings *how = w->how;
    cu_stream stream = w->lane->shared;
    cu_event events[MAX_DEPTH];
    CU(cu.cuCtxPushCurrent(w->lane->context));
    if (how->own_streams)
        CU(cu.cuStreamCreateWithPriority(&stream, CU_NON_BLOCKING, 0));
    for (int i = 0; i < how->depth; i++)
        CU(cu.cuEventCreate(&events[i], CU_WITHOUT_TIMING));
    for (size_t job; (job = w->lane->next++) < w->lane->count; w->tiles++) {
        const part *p = &w->lane->parts[job];
        size_t turn = w->tiles % (size_t)how->depth;
        char *tile = w->memory + turn * how->tile;
        uint64_t begin = now();
        wait_event(events[turn], how->wait);
        uint64_t free = now();
        for (size_t got = 0; how->read && got < p->bytes;) {
            ssize_t n = pread(p->fd, tile + got, p->bytes - got, p->offset + (off_t)got);
            need(n > 0, "pread");
            got += (size_t)n;
        }
        uint64_t read = now(), submitted = read;
        if (how->upload) {
            CU(cu.cuMemcpyHtoDAsync(p->to, tile, p->bytes, stream));
            submitted = now();
            CU(cu.cuEventRecord(events[turn], stream));
        }
        w->waiting += free - begin;
        w->reading += read - free;
        w->submitting += submitted - read;
        w->recording += now() - submitted;
    }
    for (int i = 0; i < how->depth; i++) {
        wait_event(events[i], how->wait);
        CU(cu.cuEventDestroy(events[i]));
    }
    if (how->own_streams)
        CU(cu.cuStreamDestroy(stream));
    cu_context popped;
    CU(cu.cuCtxPopCurrent(&popped));
    return NULL;
}

/* File after file, each device a run of them. */
static void cut(size_t tile)
{
    size_t total = 0, at[MAX_DEVICES] = {0};
    for (int i = 0; i < file_count; i++)
        total += sizes[i];
    size_t share = total / (size_t)lane_count / tile * tile + tile, seen = 0;
    for (int i = 0; i < lane_count; i++) {
        free(lanes[i].parts);
        lanes[i].parts = malloc((share / tile + MAX_FILES + 2) * sizeof(part));
        need(lanes[i].parts != NULL, "malloc");
        lanes[i].count = lanes[i].next = 0;
    }
    for (int i = 0; i < file_count; i++)
        for (size_t offset = 0; offset < sizes[i]; offset += tile) {
            size_t bytes = sizes[i] - offset < tile ? sizes[i] - offset : tile;
            lane *l = &lanes[seen / share];
            l->parts[l->count++] = (part){files[i], (off_t)offset, bytes, l->memory + at[l - lanes]};
            at[l - lanes] += bytes;
            seen += bytes;
        }
}

static void run(const settings *how)
{
    static worker workers[MAX_THREADS];
    void *pinned;
    size_t ring = (size_t)how->depth * how->tile;
    cut(how->tile);
    uint64_t begin = now();
    CU(cu.cuMemHostAlloc(&pinned, ring * (size_t)how->threads, CU_PORTABLE));
    uint64_t pin = now() - begin;
    begin = now();
    for (int i = 0; i < how->threads; i++) {
        workers[i] = (worker){.how = how, .lane = &lanes[i % lane_count], .memory = (char *)pinned + (size_t)i * ring};
        need(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0, "pthread_create");
    }
    worker sum = {.tiles = 0};
    for (int i = 0; i < how->threads; i++) {
        pthread_join(workers[i].thread, NULL);
        sum.waiting += workers[i].waiting;
        sum.reading += workers[i].reading;
        sum.submitting += workers[i].submitting;
        sum.recording += workers[i].recording;
        sum.tiles += workers[i].tiles;
    }
    uint64_t end = now();
    CU(cu.cuMemFreeHost(pinned));
    double tiles = (double)sum.tiles * 1e3;
    printf("{\"seconds\": %.6f, \"pin\": %.6f, \"wait\": %.2f, \"read\": %.2f, \"submit\": %.2f, \"record\": %.2f}\n",
           (double)(end - begin) * 1e-9, (double)pin * 1e-9, (double)sum.waiting / tiles, (double)sum.reading / tiles,
           (double)sum.submitting / tiles, (double)sum.recording / tiles);
    fflush(stdout);
}

/* ---- what page-locked memory costs ---- */

static double allocated(size_t bytes)
{
    void *memory;
    uint64_t begin = now();
    CU(cu.cuMemHostAlloc(&memory, bytes, CU_PORTABLE));
    double seconds = (double)(now() - begin) * 1e-9;
    CU(cu.cuMemFreeHost(memory));
    return seconds;
}

static void *allocate_part(void *arg)
{
    void **memory = arg;
    cu_context popped;
    CU(cu.cuCtxPushCurrent(lanes[0].context));
    CU(cu.cuMemHostAlloc(memory, RING / PARTS, CU_PORTABLE));
    CU(cu.cuCtxPopCurrent(&popped));
    return NULL;
}

static double allocated_together(void)
{
    pthread_t threads[PARTS];
    void *memory[PARTS];
    uint64_t begin = now();
    for (int i = 0; i < PARTS; i++)
        need(pthread_create(&threads[i], NULL, allocate_part, &memory[i]) == 0, "pthread_create");
    for (int i = 0; i < PARTS; i++)
        pthread_join(threads[i], NULL);
    double seconds = (double)(now() - begin) * 1e-9;
    for (int i = 0; i < PARTS; i++)
        CU(cu.cuMemFreeHost(memory[i]));
    return seconds;
}

/* Ordinary memory, in huge pages or not, that is touched and then page-locked: seconds of both. */
static void registered(int huge, double *touching, double *locking)
{
    *touching = *locking = 0;
    if (!cuMemHostRegister)
        return;
    char *memory = mmap(NULL, RING, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "mmap");
    madvise(memory, RING, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    uint64_t begin = now();
    for (size_t at = 0; at < RING; at += 4096)
        memory[at] = 1;
    uint64_t touched = now();
    CU(cuMemHostRegister(memory, RING, CU_PORTABLE));
    *touching = (double)(touched - begin) * 1e-9;
    *locking = (double)(now() - touched) * 1e-9;
    CU(cuMemHostUnregister(memory));
    munmap(memory, RING);
}

static void say_costs(uint64_t contexts, uint64_t memory)
{
    double touching[2], locking[2];
    for (int huge = 0; huge < 2; huge++)
        registered(huge, &touching[huge], &locking[huge]);
    printf("{\"contexts\": %.6f, \"device memory\": %.6f, \"page-locked 16 MiB\": %.6f, \"page-locked 64 MiB\": %.6f, "
           "\"64 MiB, 8 threads\": %.6f, \"64 MiB: touching\": %.6f, \"registering\": %.6f, "
           "\"64 MiB, huge: touching\": %.6f, \"registering huge\": %.6f}\n",
           (double)contexts * 1e-9, (double)memory * 1e-9, allocated(RING / 4), allocated(RING), allocated_together(),
           touching[0], locking[0], touching[1], locking[1]);
    fflush(stdout);
}

/* ---- the program ---- */

static void open_lanes(char *devices, size_t tile)
{
    size_t total = 0;
    for (int i = 0; i < file_count; i++)
        total += sizes[i];
    uint64_t contexts = 0, memory = 0;
    for (char *at = strtok(devices, ","); at && lane_count < MAX_DEVICES; at = strtok(NULL, ",")) {
        lane *l = &lanes[lane_count++];
        cu_device device;
        uint64_t begin = now();
        CU(cu.cuDeviceGet(&device, atoi(at)));
        CU(cu.cuDevicePrimaryCtxRetain(&l->context, device));
        CU(cu.cuCtxPushCurrent(l->context));
        CU(cu.cuStreamCreateWithPriority(&l->shared, CU_NON_BLOCKING, 0));
        contexts += now() - begin;
        begin = now();
        CU(cu.cuMemAlloc(&l->memory, total + tile));
        memory += now() - begin;
    }
    say_costs(contexts, memory);
}

int main(int argc, char **argv)
{
    need(argc > 3 && argc - 3 <= MAX_FILES, "reading the arguments");
    for (int i = 3; i < argc; i++) {
        struct stat found;
        files[file_count] = open(argv[i], O_RDONLY | O_CLOEXEC);
        need(files[file_count] >= 0 && fstat(files[file_count], &found) == 0, "opening a file");
        sizes[file_count++] = (size_t)found.st_size;
    }
    bind();
    CU(cu.cuInit(0));
    open_lanes(argv[1], strtoul(argv[2], NULL, 10));
    settings how;
    while (scanf("%d %zu %d %d %d %d %d", &how.threads, &how.tile, &how.depth, &how.own_streams, &how.wait, &how.read,
                 &how.upload) == 7) {
        need(how.threads > 0 && how.threads <= MAX_THREADS && how.depth > 0 && how.depth <= MAX_DEPTH && how.tile,
             "reading the settings");
        run(&how);
    }
    return 0;
}
