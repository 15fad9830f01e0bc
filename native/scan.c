/*
 * Reads the headers of model files fast. It only tells clean headers from all others: whatever it does not recognise is
 * for the readers in Python to judge, which know every reason to refuse a file.
 */
#include "xdev.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"

enum { MAX_RANK = 64, MAX_DIGITS = 18, MAX_NUMBER = 9 };

/* ---- text ---- */

typedef struct text {
    const char *at, *end;
} text;

static void skip_space(text *t)
{
    while (t->at < t->end && (*t->at == ' ' || *t->at == '\n'))
        t->at++;
}

static int next_is(text *t, char wanted)
{
    skip_space(t);
    if (t->at == t->end || *t->at != wanted)
        return 0;
    t->at++;
    return 1;
}

/* How many of eight bytes come before the first that ends a string, begins an escape or is below a space. */
static int plain_bytes(const char *at)
{
    const uint64_t ones = 0x0101010101010101u, highs = ones << 7;
    uint64_t bytes;
    memcpy(&bytes, at, sizeof bytes);
    bytes = le64toh(bytes);
    uint64_t quotes = bytes ^ ones * '"', slashes = bytes ^ ones * '\\'; /* 0 where one is */
    uint64_t found = ((bytes - ones * ' ') & ~bytes) | ((quotes - ones) & ~quotes) | ((slashes - ones) & ~slashes);
    return found & highs ? __builtin_ctzll(found & highs) / 8 : 8;
}

/* A string without escapes. */
static int plain_string(text *t, const char **begin, size_t *bytes)
{
    if (!next_is(t, '"'))
        return 0;
    *begin = t->at;
    for (int step = 8; step == 8 && t->end - t->at >= 8; t->at += step)
        step = plain_bytes(t->at);
    while (t->at < t->end && *t->at != '"' && *t->at != '\\' && (unsigned char)*t->at >= ' ')
        t->at++;
    *bytes = (size_t)(t->at - *begin);
    return t->at < t->end && *t->at++ == '"';
}

static int whole_number(text *t, uint64_t *out)
{
    skip_space(t);
    const char *begin = t->at;
    uint64_t value = 0;
    while (t->at < t->end && *t->at >= '0' && *t->at <= '9' && t->at - begin < MAX_DIGITS)
        value = value * 10 + (uint64_t)(*t->at++ - '0');
    *out = value;
    return t->at > begin && (*begin != '0' || t->at - begin == 1);
}

static int is(const char *begin, size_t bytes, const char *name)
{
    return strlen(name) == bytes && memcmp(begin, name, bytes) == 0;
}

/* ---- entries ---- */

/* How many values; 0 where that is more than fits, which no tensor of that many bytes can be. */
static int count_values(const xd_scan *scan, const xd_scan_entry *entry, uint64_t *out)
{
    uint64_t values = 1;
    int empty = 0;
    for (uint32_t i = 0; i < entry->rank; i++) {
        uint64_t extent = scan->extents[entry->extents + i];
        empty |= !extent;
        if (extent && __builtin_mul_overflow(values, extent, &values))
            return 0;
    }
    *out = empty ? 0 : values;
    return values <= INT64_MAX;
}

static int by_offset(const void *a, const void *b)
{
    const xd_scan_entry *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    return x->name < y->name ? -1 : 1; /* empty ones keep the order of the header */
}

static void sort(xd_scan *scan)
{
    size_t i = 1;
    while (i < scan->count && by_offset(&scan->entries[i - 1], &scan->entries[i]) < 0)
        i++;
    if (i < scan->count) /* most headers are sorted */
        qsort(scan->entries, scan->count, sizeof scan->entries[0], by_offset);
}

/* Sorted by offset, each entry must begin where the one before ends, rounded up; the last ends within `present`. */
static int covers(xd_scan *scan, uint64_t alignment, uint64_t present)
{
    uint64_t reached = 0;
    sort(scan);
    for (size_t i = 0; i < scan->count; i++) {
        const xd_scan_entry *entry = &scan->entries[i];
        uint64_t begin = (reached + alignment - 1) / alignment * alignment;
        if (entry->offset != begin || begin > present || entry->bytes > present - begin)
            return 0;
        reached = entry->offset + entry->bytes;
    }
    scan->reached = reached;
    return 1;
}

/* ---- safetensors ---- */

/* The search begins with the type that the entry before has. */
static int find_dtype(const xd_scan_type *types, size_t count, int before, const char *begin, size_t bytes)
{
    if (before >= 0 && is(begin, bytes, types[before].name))
        return before;
    for (size_t i = 0; i < count; i++)
        if (is(begin, bytes, types[i].name))
            return (int)i;
    return -1;
}

static int shape(text *t, xd_scan *scan, xd_scan_entry *entry)
{
    if (!next_is(t, '['))
        return 0;
    entry->extents = (uint32_t)scan->extent_count;
    entry->rank = 0;
    if (next_is(t, ']'))
        return 1;
    do {
        if (entry->rank == MAX_RANK || scan->extent_count == scan->extent_room ||
            !whole_number(t, &scan->extents[scan->extent_count++]))
            return 0;
        entry->rank++;
    } while (next_is(t, ','));
    return next_is(t, ']');
}

static int offsets(text *t, xd_scan_entry *entry)
{
    uint64_t end;
    if (!next_is(t, '[') || !whole_number(t, &entry->offset) || !next_is(t, ',') || !whole_number(t, &end) ||
        !next_is(t, ']') || end < entry->offset)
        return 0;
    entry->bytes = end - entry->offset;
    return 1;
}

/* {"dtype": ..., "shape": ..., "data_offsets": ...}, each once. */
static int tensor(text *t, xd_scan *scan, const xd_scan_type *types, size_t type_count, xd_scan_entry *entry)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4, ALL = 7 };
    int seen = 0, before = scan->count > 1 ? entry[-1].type : -1;
    if (!next_is(t, '{'))
        return 0;
    do {
        const char *key, *name;
        size_t key_bytes, bytes;
        if (!plain_string(t, &key, &key_bytes) || !next_is(t, ':'))
            return 0;
        int field = is(key, key_bytes, "dtype") ? DTYPE : is(key, key_bytes, "shape") ? SHAPE :
                    is(key, key_bytes, "data_offsets") ? OFFSETS : 0;
        if (!field || seen & field)
            return 0;
        seen |= field;
        if (field == DTYPE) {
            if (!plain_string(t, &name, &bytes) ||
                (entry->type = find_dtype(types, type_count, before, name, bytes)) < 0)
                return 0;
        } else if (!(field == SHAPE ? shape(t, scan, entry) : offsets(t, entry))) {
            return 0;
        }
    } while (next_is(t, ','));
    uint64_t values, bits;
    return seen == ALL && next_is(t, '}') && count_values(scan, entry, &values) &&
           !__builtin_mul_overflow(values, types[entry->type].bits, &bits) && bits % 8 == 0 && bits / 8 == entry->bytes;
}

/* An object of plain strings. */
static int metadata(text *t)
{
    const char *begin;
    size_t bytes;
    if (!next_is(t, '{'))
        return 0;
    if (next_is(t, '}'))
        return 1;
    do
        if (!plain_string(t, &begin, &bytes) || !next_is(t, ':') || !plain_string(t, &begin, &bytes))
            return 0;
    while (next_is(t, ','));
    return next_is(t, '}');
}

int xd_scan_safetensors(xd_scan *scan, const char *header, size_t bytes, uint64_t present, const xd_scan_type *types,
                        size_t type_count)
{
    text t = {header, header + bytes};
    size_t room = scan->count;
    scan->count = scan->extent_count = 0;
    scan->metadata_bytes = 0;
    if (bytes > UINT32_MAX || !next_is(&t, '{'))
        return 0;
    do {
        const char *name;
        size_t name_bytes;
        if (!plain_string(&t, &name, &name_bytes) || !next_is(&t, ':'))
            return 0;
        if (is(name, name_bytes, "__metadata__")) {
            const char *begin = t.at;
            if (scan->metadata_bytes || !metadata(&t))
                return 0;
            scan->metadata = (uint32_t)(begin - header);
            scan->metadata_bytes = (uint32_t)(t.at - begin);
            continue;
        }
        if (scan->count == room)
            return 0;
        xd_scan_entry *entry = &scan->entries[scan->count++];
        entry->name = (uint32_t)(name - header);
        entry->name_bytes = (uint32_t)name_bytes;
        entry->hash = xd_hash(name, name_bytes);
        if (!tensor(&t, scan, types, type_count, entry))
            return 0;
    } while (next_is(&t, ','));
    if (!next_is(&t, '}'))
        return 0;
    skip_space(&t);
    return t.at == t.end && covers(scan, 1, present) && scan->reached == present;
}

/* ---- GGUF ---- */

typedef struct bytes {
    const unsigned char *base;
    size_t at, end;
} bytes;

static int number(bytes *b, size_t width, uint64_t *out)
{
    if (b->end - b->at < width)
        return 0;
    *out = 0;
    for (size_t i = 0; i < width; i++)
        *out |= (uint64_t)b->base[b->at + i] << (8 * i);
    b->at += width;
    return 1;
}

int64_t xd_scan_gguf_strings(const void *header, size_t bytes_held, size_t at, uint64_t count)
{
    bytes b = {header, at, bytes_held};
    uint64_t length;
    for (; count; count--) {
        if (!number(&b, 8, &length) || length > b.end - b.at)
            return -1;
        b.at += length;
    }
    return (int64_t)b.at;
}

int64_t xd_scan_gguf(xd_scan *scan, const void *header, size_t bytes_held, size_t at, uint64_t alignment,
                     uint64_t file_bytes, const xd_scan_type *types, size_t type_count)
{
    bytes b = {header, at, bytes_held};
    if (bytes_held > UINT32_MAX)
        return -1;
    scan->extent_count = 0;
    for (size_t i = 0; i < scan->count; i++) {
        xd_scan_entry *entry = &scan->entries[i];
        uint64_t length, rank, type, values;
        if (!number(&b, 8, &length) || length > b.end - b.at)
            return -1;
        entry->name = (uint32_t)b.at;
        entry->name_bytes = (uint32_t)length;
        entry->hash = xd_hash(b.base + b.at, length);
        b.at += length;
        if (!number(&b, 4, &rank) || rank > 4 || scan->extent_room - scan->extent_count < rank)
            return -1;
        entry->extents = (uint32_t)scan->extent_count;
        entry->rank = (uint32_t)rank;
        uint64_t row = 1;
        for (uint64_t axis = 0; axis < rank; axis++) { /* fastest first in the file, last here */
            uint64_t extent;
            if (!number(&b, 8, &extent) || extent > INT64_MAX)
                return -1;
            scan->extents[entry->extents + rank - 1 - axis] = extent;
            row = axis ? row : extent;
        }
        scan->extent_count += rank;
        if (!number(&b, 4, &type) || type >= type_count || !types[type].values || row % types[type].values ||
            !number(&b, 8, &entry->offset) || entry->offset % alignment || !count_values(scan, entry, &values) ||
            __builtin_mul_overflow(values / types[type].values, types[type].bits / 8, &entry->bytes))
            return -1;
        entry->type = (int)type;
    }
    uint64_t data = (b.at + alignment - 1) / alignment * alignment;
    uint64_t present = data <= file_bytes ? file_bytes - data : 0;
    return covers(scan, alignment, present) ? (int64_t)b.at : -1;
}

/* ---- names ---- */

static int is_one_of(const char *begin, size_t bytes, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (is(begin, bytes, words[i]))
            return 1;
    return 0;
}

/* -1 where the bytes are not a number of up to nine digits. */
static int64_t short_number(const char *begin, size_t bytes)
{
    int64_t value = 0;
    if (!bytes || bytes > MAX_NUMBER)
        return -1;
    for (size_t i = 0; i < bytes; i++) {
        if (begin[i] < '0' || begin[i] > '9')
            return -1;
        value = value * 10 + (begin[i] - '0');
    }
    return value;
}

static int64_t number_after(const char *at, const char *end, const char *const *words, size_t word_count)
{
    const char *dot = memchr(at, '.', (size_t)(end - at));
    while (dot) {
        const char *part = dot + 1, *after = memchr(part, '.', (size_t)(end - part));
        int64_t number = short_number(part, (size_t)((after ? after : end) - part));
        if (number >= 0 && is_one_of(at, (size_t)(dot - at), words, word_count))
            return number;
        at = part;
        dot = after;
    }
    return -1;
}

void xd_scan_numbers(const char *header, const xd_scan_entry *entries, size_t count, const char *const *words,
                     size_t word_count, int64_t *out)
{
    for (size_t i = 0; i < count; i++) {
        const char *name = header + entries[i].name;
        out[i] = number_after(name, name + entries[i].name_bytes, words, word_count);
    }
}
