/* Pieces of files, cut into what fits a tile. */
#include "work.h"

#include <math.h>
#include <stdlib.h>

#include "internal.h"

typedef struct item {
    xd_piece piece;
    size_t row; /* in the caller's array */
    size_t source;
} item;

/* One device's share of the work. */
typedef struct lane {
    size_t next, end;     /* its items that are not wholly taken */
    uint64_t taken;       /* bytes of the first of them */
    uint64_t left, total; /* bytes still to take, of all */
    unsigned workers;     /* that serve it now */
} lane;

struct xd_work {
    int devices;
    uint64_t room;
    lane *lanes; /* one a device */
    item *items; /* lane after lane, each in the caller's order */
    xd_source *sources;
    size_t source_count;
};

/* Pieces of one file usually come in a row, so the search begins at the last file. */
static size_t find_source(xd_work *work, const xd_piece *piece)
{
    size_t i = work->source_count;
    while (i && work->sources[i - 1].fd != piece->fd)
        i--;
    if (i)
        return i - 1;
    xd_source *added = &work->sources[work->source_count];
    added->fd = piece->fd;
    added->direct_fd = piece->direct_fd;
    added->in_memory = xd_source_in_memory(piece->fd);
    return work->source_count++;
}

/* Sorts what has bytes into lanes. */
static void fill_lanes(xd_work *work, const xd_piece *pieces, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        lane *lane = &work->lanes[pieces[i].device];
        lane->end += pieces[i].bytes > 0;
        lane->total += pieces[i].bytes;
        lane->left = lane->total;
    }
    size_t begin = 0;
    for (int device = 0; device < work->devices; device++) {
        lane *lane = &work->lanes[device];
        size_t length = lane->end;
        lane->next = lane->end = begin;
        begin += length;
    }
    for (size_t i = 0; i < count; i++) {
        if (!pieces[i].bytes)
            continue;
        lane *lane = &work->lanes[pieces[i].device];
        work->items[lane->end++] = (item){pieces[i], i, find_source(work, &pieces[i])};
    }
}

int xd_work_open(xd_work **out, int devices, const xd_piece *pieces, size_t count, uint64_t room, xd_error *err)
{
    static const char operation[] = "reader_open";
    xd_work *work = xd_new(sizeof *work, operation, err);
    if (!work)
        return XD_NO_HOST_MEMORY;
    work->devices = devices;
    work->room = room;
    if (!(work->lanes = xd_new((size_t)devices * sizeof work->lanes[0], operation, err)) ||
        !(work->items = xd_new((count + 1) * sizeof work->items[0], operation, err)) ||
        !(work->sources = xd_new((count + 1) * sizeof work->sources[0], operation, err))) {
        xd_work_close(&work);
        return XD_NO_HOST_MEMORY;
    }
    fill_lanes(work, pieces, count);
    *out = work;
    return XD_OK;
}

void xd_work_close(xd_work **at)
{
    xd_work *work = *at;
    if (!work)
        return;
    free(work->sources);
    free(work->items);
    free(work->lanes);
    free(work);
    *at = NULL;
}

uint64_t xd_work_total(const xd_work *work, int device)
{
    return work->lanes[device].total;
}

xd_source *xd_work_source(const xd_work *work, int fd)
{
    for (size_t i = 0; i < work->source_count; i++)
        if (work->sources[i].fd == fd)
            return &work->sources[i];
    return NULL;
}

/* ---- cutting ---- */

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* How many workers there are to a byte that is left: the lane with the fewest is served next. */
static double crowd(const lane *lane, unsigned more)
{
    return lane->left ? (lane->workers + more) / (double)lane->left : HUGE_VAL;
}

/* The device that a worker serves: it stays where it is unless another device is that much behind that the move helps,
   so that all devices end together and a worker seldom changes. -1: there is no work. */
static int choose_lane(const xd_work *work, int before)
{
    int chosen = -1;
    double least = before < 0 ? HUGE_VAL : crowd(&work->lanes[before], 0);
    if (least < HUGE_VAL)
        chosen = before;
    for (int device = 0; device < work->devices; device++) {
        double here = device == before ? HUGE_VAL : crowd(&work->lanes[device], 1);
        if (here < least) {
            least = here;
            chosen = device;
        }
    }
    return chosen;
}

/* The lane's next item begins a job. */
static void begin(xd_work *work, const lane *lane, xd_job *job)
{
    const item *item = &work->items[lane->next];
    uint64_t offset = item->piece.offset + lane->taken;
    job->source = &work->sources[item->source];
    job->row = item->row;
    job->device = item->piece.device;
    job->address = item->piece.address + lane->taken;
    job->payload = 0;
    job->extent.spans = 1;
    job->extent.bytes = 0;
    job->extent.end = offset;
    job->extent.span[0] = (xd_span){.offset = offset};
}

/* Bytes of the file that a job takes at most: a tile's, and towards the end no more than a worker's part of what is left,
   down to an eighth of a tile, so that all workers end together. */
static uint64_t fair(const xd_work *work, const lane *lane)
{
    enum { PAGE = XD_SOURCE_PAGE };
    uint64_t part = lane->left / lane->workers, smallest = work->room / 8;
    return least(work->room, ((part > smallest ? part : smallest) + PAGE - 1) / PAGE * PAGE);
}

/* Adds the lane's next item, or as much of it as fits, if it is a neighbour. Returns 0 when the job is complete. */
static int extend(xd_work *work, lane *lane, xd_job *job, uint64_t limit)
{
    if (lane->next == lane->end)
        return 0;
    const item *item = &work->items[lane->next];
    xd_extent *extent = &job->extent;
    uint64_t offset = item->piece.offset + lane->taken;
    uint64_t at = item->piece.address + lane->taken - job->address; /* huge where the address is below the job's */
    if (job->source != &work->sources[item->source] || offset < extent->end || offset >= limit ||
        at >= work->room)
        return 0;
    uint64_t file_gap = offset - extent->end, gap = at - extent->bytes; /* huge if it is below the image's end */
    int splits = file_gap != gap;
    if (gap >= XD_SOURCE_PAGE || file_gap > gap || (splits && extent->spans == XD_SOURCE_MAX_SPANS))
        return 0;
    uint64_t bytes = least(item->piece.bytes - lane->taken, least(limit - offset, work->room - at));
    /* What lies between in the file is read too, into bytes of the image that are nobody's either. */
    extent->span[extent->spans - 1].bytes += file_gap + (splits ? 0 : bytes);
    if (splits)
        extent->span[extent->spans++] = (xd_span){.offset = offset, .bytes = bytes, .at = at};
    extent->bytes = at + bytes;
    extent->end = offset + bytes;
    job->payload += bytes;
    lane->left -= bytes;
    lane->taken += bytes;
    if (lane->taken < item->piece.bytes)
        return 0;
    lane->next++;
    lane->taken = 0;
    return 1;
}

int xd_work_take(xd_work *work, int *device, xd_job *job)
{
    int chosen = choose_lane(work, *device);
    if (*device >= 0)
        work->lanes[*device].workers--;
    *device = chosen;
    if (chosen < 0)
        return 0;
    lane *lane = &work->lanes[chosen];
    lane->workers++;
    begin(work, lane, job);
    uint64_t limit = xd_source_limit(job->source, job->extent.end, fair(work, lane));
    while (extend(work, lane, job, limit))
        ;
    return 1;
}

void xd_work_leave(xd_work *work, int device)
{
    if (device >= 0)
        work->lanes[device].workers--;
}
