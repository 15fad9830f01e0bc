/* XXH64, the 64-bit hash of the xxHash family (seed 0), after its public specification. */
#include "hash.h"

#include <string.h>

static const uint64_t P1 = UINT64_C(0x9E3779B185EBCA87), P2 = UINT64_C(0xC2B2AE3D27D4EB4F),
                      P3 = UINT64_C(0x165667B19E3779F9), P4 = UINT64_C(0x85EBCA77C2B2AE63),
                      P5 = UINT64_C(0x27D4EB2F165667C5);

static uint64_t turn(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t word(const unsigned char *at) /* little-endian machines only, as all of the loader */
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t round_of(uint64_t lane, uint64_t input)
{
    return turn(lane + input * P2, 31) * P1;
}

static uint64_t merge(uint64_t hash, uint64_t lane)
{
    return (hash ^ round_of(0, lane)) * P1 + P4;
}

uint64_t xd_hash(const void *bytes, size_t count)
{
    const unsigned char *at = bytes, *end = at + count;
    uint64_t hash = P5;
    if (count >= 32) {
        uint64_t lanes[4] = {P1 + P2, P2, 0, UINT64_C(0) - P1};
        for (; end - at >= 32; at += 32)
            for (int i = 0; i < 4; i++)
                lanes[i] = round_of(lanes[i], word(at + 8 * i));
        hash = turn(lanes[0], 1) + turn(lanes[1], 7) + turn(lanes[2], 12) + turn(lanes[3], 18);
        for (int i = 0; i < 4; i++)
            hash = merge(hash, lanes[i]);
    }
    hash += count;
    for (; end - at >= 8; at += 8)
        hash = turn(hash ^ round_of(0, word(at)), 27) * P1 + P4;
    if (end - at >= 4) {
        uint32_t half;
        memcpy(&half, at, sizeof half);
        hash = turn(hash ^ half * P1, 23) * P2 + P3;
        at += 4;
    }
    for (; at < end; at++)
        hash = turn(hash ^ *at * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}
