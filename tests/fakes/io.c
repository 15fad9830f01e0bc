/* The reader's system calls with faults in them. A test arms one plan; the calls are counted from 1 from then on. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include "xdev.h"

typedef struct plan {
    int direct_only;    /* plain reads are let through and not counted */
    int code;           /* the errno of call `at`, and of those after it if sticky */
    int sticky;
    long at;
    long most;          /* bytes a call gives at most; 0: no limit */
    long end;           /* the file ends here; 0: where it does */
    long cached;        /* what `cached` answers: a percentage, or -1 */
    long nap;           /* microseconds each call takes longer */
    int nothing;        /* calls succeed and read nothing: what remains is everything else */
} plan;

static plan armed;
static long calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static ssize_t faulty_preadv(int fd, const struct iovec *parts, int count, off_t offset)
{
    pthread_mutex_lock(&lock);
    plan now = armed;
    if (now.nothing) {
        pthread_mutex_unlock(&lock);
        ssize_t all = 0;
        for (int i = 0; i < count; i++)
            all += (ssize_t)parts[i].iov_len;
        return all;
    }
    int meant = !now.direct_only || fcntl(fd, F_GETFL) & O_DIRECT;
    long number = meant ? ++calls : 0;
    pthread_mutex_unlock(&lock);
    if (!meant)
        return preadv(fd, parts, count, offset);
    if (now.nap)
        usleep((useconds_t)now.nap);
    if (now.code && (number == now.at || (now.sticky && number > now.at))) {
        errno = now.code;
        return -1;
    }
    size_t room = now.most ? (size_t)now.most : SIZE_MAX;
    if (now.end && offset >= now.end)
        return 0;
    if (now.end && (size_t)(now.end - offset) < room)
        room = (size_t)(now.end - offset);
    if (fcntl(fd, F_GETFL) & O_DIRECT) { /* whole pages or nothing: give less than was read */
        ssize_t n = preadv(fd, parts, count, offset);
        return n > 0 && (size_t)n > room ? (ssize_t)room : n;
    }
    struct iovec cut[1024];
    int used = 0;
    for (; used < count && room; used++) {
        cut[used] = parts[used];
        if (cut[used].iov_len > room)
            cut[used].iov_len = room;
        room -= cut[used].iov_len;
    }
    return preadv(fd, cut, used, offset);
}

static int64_t faulty_cached(int fd, uint64_t offset, uint64_t bytes)
{
    (void)fd, (void)offset;
    return armed.cached < 0 ? -1 : (int64_t)(bytes * (uint64_t)armed.cached / 100);
}

__attribute__((visibility("default"))) extern const xd_io io_calls;
const xd_io io_calls = {.preadv = faulty_preadv, .cached = faulty_cached};

__attribute__((visibility("default"))) void io_arm(const plan *next);
void io_arm(const plan *next)
{
    pthread_mutex_lock(&lock);
    armed = *next;
    calls = 0;
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) long io_count(void);
long io_count(void)
{
    return calls;
}
