/* The header scanner: what it reads of clean headers, and that no header at all makes it leave the memory it was given
   (the address sanitizer looks on). */
#include "check.h"
#include "hash.h"

enum { ROOM = 64, ROUNDS = 20000 };

static const xd_scan_type dtypes[] = {{"F32", 1, 32}, {"F4", 1, 4}, {"U8", 1, 8}};
static const xd_scan_type blocks[] = {{"F32", 1, 32}, {"F16", 1, 16}, {"Q4_0", 32, 18 * 8}, {NULL, 0, 0}};

static xd_scan_entry entries[ROOM];
static uint64_t extents[4 * ROOM];

static xd_scan fresh(size_t count)
{
    return (xd_scan){.count = count, .entries = entries, .extent_room = 4 * ROOM, .extents = extents};
}

/* In a block of just its size, so that a step too far is seen. */
static int scan_text(const char *text, size_t bytes, uint64_t present, xd_scan *scan)
{
    char *copy = malloc(bytes ? bytes : 1);
    CHECK(copy);
    memcpy(copy, text, bytes);
    *scan = fresh(ROOM);
    int clean = xd_scan_safetensors(scan, copy, bytes, present, dtypes, 3);
    free(copy);
    return clean;
}

static const char whole[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
    " \"a\": {\"data_offsets\": [0, 4], \"shape\": [8], \"dtype\": \"F4\"},\n"
    "\"z\":{\"dtype\":\"U8\",\"shape\":[0,9],\"data_offsets\":[28,28]},"
    "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[28,32]}}   ";

static void clean_text(void)
{
    xd_scan scan;
    CHECK(scan_text(whole, strlen(whole), 32, &scan));
    CHECK_EQ(scan.count, 4);
    static const struct { char name; uint64_t offset, bytes; uint32_t rank; int type; } table[] = {
        {'a', 0, 4, 1, 1}, {'b', 4, 24, 2, 0}, {'z', 28, 0, 2, 2}, {'s', 28, 4, 0, 0},
    };
    for (size_t i = 0; i < 4; i++) {
        const xd_scan_entry *entry = &entries[i];
        CHECK_EQ(whole[entry->name], table[i].name);
        CHECK_EQ(entry->name_bytes, 1);
        CHECK_EQ(entry->hash, xd_hash(&table[i].name, 1));
        CHECK_EQ(entry->offset, table[i].offset);
        CHECK_EQ(entry->bytes, table[i].bytes);
        CHECK_EQ(entry->rank, table[i].rank);
        CHECK_EQ(entry->type, table[i].type);
    }
    CHECK_EQ(extents[entries[1].extents], 2);
    CHECK_EQ(extents[entries[1].extents + 1], 3);
    CHECK_EQ(scan.metadata_bytes, strlen("{\"format\":\"pt\"}"));
    CHECK(!scan_text(whole, strlen(whole), 33, &scan));
    CHECK(!scan_text(whole, strlen(whole), 31, &scan));
    for (size_t bytes = 0; bytes < strlen(whole) - 3; bytes++)
        CHECK(!scan_text(whole, bytes, 32, &scan));
}

static void other_text(void)
{
    static const char *const texts[] = {
        "", "{", "[]", "{}x", "{\"a\":1}", "{\"a\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},}",
        "{\"a\\u0000\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"more\":1}}",
        "{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,0]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[999999999999999999,999999999999999999],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,99999999999999999999]}}",
        "{\"__metadata__\":{},\"__metadata__\":{},\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
        "{\"__metadata__\":{\"a\":1}}", "{\"__metadata__\":null}",
    };
    xd_scan scan;
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
        CHECK(!scan_text(texts[i], strlen(texts[i]), 4, &scan));
}

static uint64_t put(unsigned char *at, uint64_t place, uint64_t value, int width)
{
    for (int i = 0; i < width; i++)
        at[place + (uint64_t)i] = (unsigned char)(value >> (8 * i));
    return place + (uint64_t)width;
}

/* Three tensors out of order: b [2,32] Q4_0 at 64, a [3] F32 at 0, s F16 at 128. */
static uint64_t make_gguf(unsigned char *at)
{
    static const struct { char name; int rank; uint64_t dims[2]; int type; uint64_t offset; } table[] = {
        {'b', 2, {32, 2}, 2, 32}, {'a', 1, {3, 0}, 0, 0}, {'s', 0, {0, 0}, 1, 96},
    };
    uint64_t place = 0;
    for (int i = 0; i < 3; i++) {
        place = put(at, put(at, place, 1, 8), (uint64_t)table[i].name, 1);
        place = put(at, place, (uint64_t)table[i].rank, 4);
        for (int axis = 0; axis < table[i].rank; axis++)
            place = put(at, place, table[i].dims[axis], 8);
        place = put(at, put(at, place, (uint64_t)table[i].type, 4), table[i].offset, 8);
    }
    return place;
}

static int64_t scan_bytes(const unsigned char *bytes, size_t held, uint64_t file_bytes)
{
    unsigned char *copy = malloc(held ? held : 1);
    CHECK(copy);
    memcpy(copy, bytes, held);
    xd_scan scan = fresh(3);
    int64_t end = xd_scan_gguf(&scan, copy, held, 0, 32, file_bytes, blocks, 4);
    free(copy);
    return end;
}

static void gguf(void)
{
    unsigned char bytes[256];
    uint64_t end = make_gguf(bytes), data = (end + 31) / 32 * 32;
    CHECK_EQ(scan_bytes(bytes, end, data + 98), (int64_t)end);
    CHECK_EQ(bytes[entries[0].name], 'a');
    CHECK_EQ(entries[0].bytes, 12);
    CHECK_EQ(bytes[entries[1].name], 'b');
    CHECK_EQ(entries[1].bytes, 36);
    CHECK_EQ(extents[entries[1].extents], 2); /* slowest first */
    CHECK_EQ(extents[entries[1].extents + 1], 32);
    CHECK_EQ(entries[2].rank, 0);
    CHECK_EQ(entries[2].bytes, 2);
    CHECK_EQ(scan_bytes(bytes, end, data + 97), -1);
    for (size_t held = 0; held < end; held++)
        CHECK_EQ(scan_bytes(bytes, held, data + 98), -1);
}

static void strings(void)
{
    unsigned char bytes[64] = {0};
    uint64_t end = put(bytes, put(bytes, 0, 3, 8) + 3, 0, 8);
    CHECK_EQ(xd_scan_gguf_strings(bytes, end, 0, 2), (int64_t)end);
    CHECK_EQ(xd_scan_gguf_strings(bytes, end, 0, 0), 0);
    CHECK_EQ(xd_scan_gguf_strings(bytes, end, 0, 3), -1);
    CHECK_EQ(xd_scan_gguf_strings(bytes, end - 1, 0, 2), -1);
    put(bytes, 0, UINT64_MAX, 8);
    CHECK_EQ(xd_scan_gguf_strings(bytes, sizeof bytes, 0, 1), -1);
}

/* Strings of every length around the eight bytes that are looked at together, ended by each byte that may end one. */
static void lengths(void)
{
    static const char begin[] = "{\"";
    static const char rest[] = "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    static const unsigned char odd[] = {0, 1, 31, '\\', '\n'}, even[] = {' ', '!', '[', ']', 127, 128, 255};
    char text[128];
    xd_scan scan;
    for (size_t length = 0; length < 40; length++) {
        size_t bytes = (size_t)snprintf(text, sizeof text, "%s%.*s%s", begin, (int)length,
                                        "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz", rest);
        CHECK(scan_text(text, bytes, 1, &scan));
        CHECK_EQ(entries[0].name_bytes, length);
        for (size_t at = 0; at < length; at++) {
            char kept = text[2 + at];
            for (size_t i = 0; i < sizeof odd; i++) {
                text[2 + at] = (char)odd[i];
                CHECK(!scan_text(text, bytes, 1, &scan));
            }
            for (size_t i = 0; i < sizeof even; i++) {
                text[2 + at] = (char)even[i];
                CHECK(scan_text(text, bytes, 1, &scan));
            }
            text[2 + at] = kept;
        }
    }
}

static int64_t number(const char *name)
{
    static const char *const words[] = {"blk", "h"};
    size_t bytes = strlen(name);
    xd_scan_entry entry = {.name_bytes = (uint32_t)bytes};
    char *copy = malloc(bytes ? bytes : 1);
    CHECK(copy);
    memcpy(copy, name, bytes);
    int64_t out = -2;
    xd_scan_numbers(copy, &entry, 1, words, 2, &out);
    free(copy);
    return out;
}

static void numbers(void)
{
    CHECK_EQ(number("blk.3.w"), 3);
    CHECK_EQ(number("a.h.007"), 7);
    CHECK_EQ(number("h.blk.1.h.2"), 1);
    CHECK_EQ(number("blk.999999999.w"), 999999999);
    CHECK_EQ(number("blk.1000000000.h.4"), 4);
    static const char *const none[] = {"", ".", "blk", "blk.", "blk..3", "xblk.3", "blk.3x", "blkx.3", "3.blk", "b.3"};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        CHECK_EQ(number(none[i]), -1);
}

static uint64_t rng = 1;

static uint64_t draw(uint64_t below)
{
    rng = rng * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (rng >> 33) % below;
}

static void changed(void)
{
    static const char pieces[] = "{}[]:,\"\\0 9z\n\x01";
    unsigned char bytes[256];
    char text[sizeof whole];
    xd_scan scan;
    int clean = 0;
    for (int round = 0; round < ROUNDS; round++) {
        memcpy(text, whole, sizeof whole);
        for (uint64_t i = draw(3) + 1; i; i--)
            text[draw(sizeof whole - 1)] = pieces[draw(sizeof pieces - 1)];
        clean += scan_text(text, sizeof whole - 1 - draw(4), 32, &scan);
        uint64_t end = make_gguf(bytes);
        for (uint64_t i = draw(3) + 1; i; i--)
            bytes[draw(end)] = (unsigned char)draw(256);
        clean += scan_bytes(bytes, end - draw(2), 4096) >= 0;
        xd_scan_gguf_strings(bytes, end, draw(end), draw(8));
    }
    CHECK(clean > 0 && clean < ROUNDS); /* a name may change and nothing else */
}

int main(void)
{
    clean_text();
    other_text();
    gguf();
    strings();
    lengths();
    numbers();
    changed();
    return 0;
}
