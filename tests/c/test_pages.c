/* Blocks of ordinary memory: whole, cleared, found again, given back, and not in a forked child. */
#include "check.h"
#include "pages.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static int is_mapped(const void *memory)
{
    unsigned char seen;
    return mincore((void *)(uintptr_t)memory, 4096, &seen) == 0;
}

int main(void)
{
    static const uint64_t sizes[] = {1, 4096, (2 << 20) - 4096, 2 << 20, (2 << 20) + 1, (9 << 20) + 5, 64 << 20};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    xd_pages pages;
    unsigned char *blocks[COUNT];
    xd_pages_init(&pages);
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = xd_pages_open(&pages, sizes[i]);
        CHECK(blocks[i] && (uintptr_t)blocks[i] % 4096 == 0);
        for (uint64_t at = 0; at < sizes[i]; at += 511)
            CHECK_EQ(blocks[i][at], 0);
        memset(blocks[i], i + 1, sizes[i]);
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(xd_pages_size(&pages, blocks[i]) >= sizes[i]);
        CHECK_EQ(blocks[i][0], i + 1);
        CHECK_EQ(blocks[i][sizes[i] - 1], i + 1);
    }
    CHECK_EQ(xd_pages_size(&pages, blocks[0] + 1), 0);

    pid_t child = fork();
    CHECK(child >= 0);
    if (!child)
        _exit(is_mapped(blocks[COUNT - 1]));
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);

    xd_pages_close(&pages, blocks[3]);
    CHECK_EQ(xd_pages_size(&pages, blocks[3]), 0);
    CHECK(!is_mapped(blocks[3]));
    for (int i = 0; i < COUNT; i++)
        if (i != 3)
            xd_pages_close(&pages, blocks[i]);
    CHECK(!xd_pages_open(&pages, UINT64_C(1) << 60));
    CHECK(xd_pages_open(&pages, 4096) != NULL);
    xd_pages_drop_all(&pages);
    return 0;
}
