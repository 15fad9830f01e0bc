#include "vendor.h"

#include <stdlib.h>
#include <string.h>

int xd_vendor_bind(void *table, const xd_symbol_request *requests, const xd_symbol *symbols, size_t count,
                   const char *vendor, xd_error *err)
{
    for (size_t i = 0; requests[i].name; i++) {
        void *address = NULL;
        for (size_t k = 0; k < count && !address; k++)
            if (!strcmp(symbols[k].name, requests[i].name))
                address = symbols[k].address;
        if (!address && !requests[i].optional)
            return xd_fail(err, XD_UNSUPPORTED, 0, "driver_create", "the %s library has no %s", vendor,
                           requests[i].name);
        memcpy((char *)table + i * sizeof address, &address, sizeof address);
    }
    return XD_OK;
}

struct xd_launch {
    xd_launches *launches;
    xd_launch *next;
    xd_launch **link; /* what points here */
    int (*run)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    atomic_int *failed;
};

int xd_launch_begin(xd_launch **out, xd_launches *launches, const xd_kernel *kernel, atomic_int *failed, xd_error *err)
{
    xd_launch *launch = calloc(1, sizeof *launch);
    if (!launch) {
        if (kernel->drop)
            kernel->drop(kernel->arg);
        return xd_fail(err, XD_NO_HOST_MEMORY, 0, "launch", "no memory for a host function");
    }
    launch->launches = launches;
    launch->run = kernel->run;
    launch->drop = kernel->drop;
    launch->arg = kernel->arg;
    launch->failed = failed;
    pthread_mutex_lock(&launches->lock);
    launch->next = launches->first;
    launch->link = &launches->first;
    if (launch->next)
        launch->next->link = &launch->next;
    launches->first = launch;
    pthread_mutex_unlock(&launches->lock);
    *out = launch;
    return XD_OK;
}

void xd_launch_cancel(xd_launch *launch)
{
    pthread_mutex_lock(&launch->launches->lock);
    *launch->link = launch->next;
    if (launch->next)
        launch->next->link = launch->link;
    pthread_mutex_unlock(&launch->launches->lock);
    if (launch->drop)
        launch->drop(launch->arg);
    free(launch);
}

void xd_launch_run(void *arg)
{
    xd_launch *launch = arg;
    if (!atomic_load(launch->failed) && launch->run(launch->arg))
        atomic_store(launch->failed, 1);
    xd_launch_cancel(launch);
}

int xd_launch_pending(xd_launches *launches)
{
    pthread_mutex_lock(&launches->lock);
    int pending = launches->first != NULL;
    pthread_mutex_unlock(&launches->lock);
    return pending;
}

void xd_launch_drop_all(xd_launches *launches)
{
    while (launches->first)
        xd_launch_cancel(launches->first);
}
