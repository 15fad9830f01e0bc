/* The checks of the C tests. A test is a program: 0 passed, 77 skipped, anything else failed. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xdev.h"

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);     \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define CHECK_EQ(got, wanted)                                                                             \
    do {                                                                                                  \
        long long got_ = (long long)(got), wanted_ = (long long)(wanted);                                 \
        if (got_ != wanted_) {                                                                            \
            fprintf(stderr, "%s:%d: %s is %lld, wanted %lld\n", __FILE__, __LINE__, #got, got_, wanted_); \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

#define CHECK_TEXT(got, wanted)                                                                             \
    do {                                                                                                    \
        const char *got_ = (got), *wanted_ = (wanted);                                                      \
        if (strcmp(got_, wanted_) != 0) {                                                                   \
            fprintf(stderr, "%s:%d: %s is\n%s\nwanted\n%s\n", __FILE__, __LINE__, #got, got_, wanted_);     \
            exit(1);                                                                                        \
        }                                                                                                   \
    } while (0)

#define CHECK_HAS(text, part)                                                                        \
    do {                                                                                             \
        if (!strstr((text), (part))) {                                                               \
            fprintf(stderr, "%s:%d: \"%s\" does not say \"%s\"\n", __FILE__, __LINE__, (text), (part)); \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

/* A call that takes &err last; the variable `err` is in scope. */
#define OK(call)                                                                                          \
    do {                                                                                                  \
        int status_ = (call);                                                                             \
        if (status_) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s in %s: %s\n", __FILE__, __LINE__, #call, xd_status_name(status_), \
                    err.operation, err.text);                                                             \
            exit(1);                                                                                      \
        }                                                                                                 \
    } while (0)

/* The call fails with this status, and says so in err as well. */
#define FAILS(call, wanted)                                                                                      \
    do {                                                                                                         \
        err = (xd_error){0};                                                                                     \
        int status_ = (call);                                                                                    \
        if (status_ != (wanted) || err.status != (wanted)) {                                                     \
            fprintf(stderr, "%s:%d: %s returned %s and wrote %s, wanted %s\n", __FILE__, __LINE__, #call,        \
                    xd_status_name(status_), xd_status_name(err.status), xd_status_name(wanted));                \
            exit(1);                                                                                             \
        }                                                                                                        \
        CHECK(err.text[0] && err.operation[0]);                                                                  \
    } while (0)

#define CHECK_NOTHING_LIVES(runtime)                                  \
    do {                                                              \
        xd_live live_;                                                \
        xd_runtime_live((runtime), &live_);                           \
        CHECK_EQ(memcmp(&live_, &(xd_live){0}, sizeof live_), 0);     \
    } while (0)

#endif
