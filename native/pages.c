/* Large blocks of ordinary memory for a vendor to page-lock: clearing their pages is most of what that costs, and several
   threads do it faster than the vendor's one. */
#include "pages.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE = 2 << 20, SMALL = 4096, THREADS = 8 };

typedef struct xd_page_block {
    struct xd_page_block *next;
    void *memory;
    uint64_t bytes;
} block;

typedef struct run {
    pthread_t thread;
    volatile char *begin;
    uint64_t bytes;
} run;

void xd_pages_init(xd_pages *pages)
{
    pages->first = NULL;
    pthread_mutex_init(&pages->lock, NULL);
}

static void *touch(void *arg)
{
    const run *r = arg;
    for (uint64_t at = 0; at < r->bytes; at += SMALL)
        r->begin[at] = 0;
    return NULL;
}

static void touch_together(char *memory, uint64_t bytes)
{
    run runs[THREADS];
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t pages = (bytes + HUGE - 1) / HUGE, count = processors < THREADS ? (uint64_t)processors : THREADS;
    uint64_t each = (pages + count - 1) / count * HUGE;
    unsigned started = 0;
    for (uint64_t at = each; at < bytes; at += each) {
        run *r = &runs[started];
        *r = (run){.begin = memory + at, .bytes = bytes - at < each ? bytes - at : each};
        if (pthread_create(&r->thread, NULL, touch, r) == 0)
            started++;
        else
            touch(r);
    }
    touch(&(run){.begin = memory, .bytes = bytes < each ? bytes : each});
    while (started)
        pthread_join(runs[--started].thread, NULL);
}

/* At a multiple of a huge page. A forked child has no use for it, and copying on write would part it from what the
   vendor has locked. */
static char *map(uint64_t bytes)
{
    char *memory = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
    uint64_t before = -(uintptr_t)memory % HUGE;
    if (before)
        munmap(memory, before);
    memory += before;
    munmap(memory + bytes, HUGE - before);
    madvise(memory, bytes, MADV_HUGEPAGE);
    madvise(memory, bytes, MADV_DONTFORK);
    return memory;
}

void *xd_pages_open(xd_pages *pages, uint64_t bytes)
{
    bytes = (bytes + SMALL - 1) / SMALL * SMALL;
    block *made = malloc(sizeof *made);
    char *memory = made ? map(bytes) : NULL;
    if (!memory) {
        free(made);
        return NULL;
    }
    touch_together(memory, bytes);
    pthread_mutex_lock(&pages->lock);
    *made = (block){.next = pages->first, .memory = memory, .bytes = bytes};
    pages->first = made;
    pthread_mutex_unlock(&pages->lock);
    return memory;
}

/* The link to this block, or to nothing; under the lock. */
static block **find(xd_pages *pages, const void *memory)
{
    block **at = &pages->first;
    while (*at && (*at)->memory != memory)
        at = &(*at)->next;
    return at;
}

uint64_t xd_pages_size(xd_pages *pages, const void *memory)
{
    pthread_mutex_lock(&pages->lock);
    const block *found = *find(pages, memory);
    uint64_t bytes = found ? found->bytes : 0;
    pthread_mutex_unlock(&pages->lock);
    return bytes;
}

void xd_pages_close(xd_pages *pages, void *memory)
{
    pthread_mutex_lock(&pages->lock);
    block **at = find(pages, memory), *found = *at;
    *at = found->next;
    pthread_mutex_unlock(&pages->lock);
    munmap(found->memory, found->bytes);
    free(found);
}

void xd_pages_drop_all(xd_pages *pages)
{
    while (pages->first) {
        block *next = pages->first->next;
        free(pages->first);
        pages->first = next;
    }
    pthread_mutex_destroy(&pages->lock);
}
