/* Large blocks of ordinary memory for a vendor to page-lock. */
#ifndef XDEV_PAGES_H
#define XDEV_PAGES_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef struct xd_pages {
    pthread_mutex_t lock;
    struct xd_page_block *first;
} xd_pages;

void xd_pages_init(xd_pages *pages);
/* Memory whose pages are there, huge ones where the system has them. NULL: there is none to be had. */
void *xd_pages_open(xd_pages *pages, uint64_t bytes);
/* Returns its size, 0 if this is no such block; then nothing has happened. */
uint64_t xd_pages_size(xd_pages *pages, const void *memory);
void xd_pages_close(xd_pages *pages, void *memory);
/* Forgets blocks that nobody gave back; their memory stays. */
void xd_pages_drop_all(xd_pages *pages);

#endif
