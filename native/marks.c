/* Checksums of what was brought to the devices, for reading it back. */
#include "marks.h"

#include <stdlib.h>

#include "hash.h"

static int append(xd_marks *marks, xd_mark mark, xd_error *err)
{
    if (marks->count == marks->room) {
        size_t room = marks->room ? 2 * marks->room : 1024;
        xd_mark *moved = realloc(marks->marks, room * sizeof *moved);
        if (!moved)
            return xd_fail(err, XD_NO_HOST_MEMORY, 0, "reader_run", "no memory for %zu checksums", room);
        marks->marks = moved;
        marks->room = room;
    }
    marks->marks[marks->count++] = mark;
    return XD_OK;
}

int xd_marks_add(xd_marks *marks, pthread_mutex_t *lock, const xd_transfer *transfer, xd_error *err)
{
    uint64_t hash = xd_hash((const void *)(uintptr_t)transfer->src, (size_t)transfer->width);
    pthread_mutex_lock(lock);
    int status = append(marks, (xd_mark){transfer->dst_device, transfer->dst, transfer->width, hash}, err);
    pthread_mutex_unlock(lock);
    return status;
}

int xd_marks_take(xd_marks *marks, xd_mark *out)
{
    if (marks->taken == marks->count)
        return 0;
    *out = marks->marks[marks->taken++];
    return 1;
}

void xd_marks_close(xd_marks *marks)
{
    free(marks->marks);
    *marks = (xd_marks){0};
}
