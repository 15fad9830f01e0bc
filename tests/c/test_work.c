/* How the work is cut: whole tiles first, then smaller ones, so that the workers of a device end together. */
#include "check.h"
#include "work.h"

enum { PAGE = XD_SOURCE_PAGE, ROOM = 32 * PAGE, MOST = 1000 };

static xd_error err;

typedef struct cut {
    size_t count;
    uint64_t bytes[MOST];
} cut;

/* Workers take turns, which is what equally fast ones do. */
static cut take_all(int workers, uint64_t bytes, uint64_t room)
{
    xd_piece one = {.fd = 0, .direct_fd = -1, .offset = 5, .bytes = bytes, .address = 1 << 20};
    xd_work *work;
    OK(xd_work_open(&work, 1, &one, 1, room, &err));
    cut found = {0};
    int devices[64], left = workers;
    uint64_t reached = one.offset;
    for (int i = 0; i < workers; i++)
        devices[i] = -1;
    for (int turn = 0; left; turn++) {
        xd_job job;
        int *device = &devices[turn % workers];
        if (*device == -2)
            continue;
        if (!xd_work_take(work, device, &job)) {
            *device = -2;
            left--;
            continue;
        }
        CHECK_EQ(job.extent.span[0].offset, reached);
        CHECK_EQ(job.address, one.address + reached - one.offset);
        CHECK(job.payload > 0 && job.payload <= room && found.count < MOST);
        found.bytes[found.count++] = job.payload;
        reached += job.payload;
    }
    CHECK_EQ(reached, one.offset + bytes);
    xd_work_close(&work);
    return found;
}

static void one_worker(void)
{
    cut found = take_all(1, 10 * ROOM + 1, ROOM);
    CHECK_EQ(found.count, 11);
    CHECK_EQ(found.bytes[9], ROOM);
    CHECK_EQ(found.bytes[10], 1);
}

static void many_workers(void)
{
    cut found = take_all(8, 100 * ROOM, ROOM);
    for (size_t i = 0; i < 92; i++)
        CHECK_EQ(found.bytes[i], ROOM);
    for (size_t i = 92; i < found.count; i++) {
        CHECK(found.bytes[i] <= found.bytes[i - 1]);
        CHECK(found.bytes[i] >= ROOM / 8 || i == found.count - 1);
    }
    CHECK(found.bytes[found.count - 1] <= ROOM / 8);
    CHECK(found.count < 100 + 4 * 8);
}

static void small_tiles(void)
{
    CHECK_EQ(take_all(8, 100 * PAGE, PAGE).count, 100); /* not below a page */
    CHECK_EQ(take_all(8, 100 * 512, 512).count, 100);
}

int main(void)
{
    one_worker();
    many_workers();
    small_tiles();
    return 0;
}
