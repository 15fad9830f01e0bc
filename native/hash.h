/* XXH64 of the xxHash family, seed 0. */
#ifndef XDEV_HASH_H
#define XDEV_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t xd_hash(const void *bytes, size_t count);

#endif
