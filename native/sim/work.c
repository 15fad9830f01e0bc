/* The calls that queue work: copies, fills, kernels. */
#include "internal.h"

#include <inttypes.h>
#include <stdio.h>

static int check_device(const sim *s, int device, const char *side, xd_error *err)
{
    if (device >= XD_HOST && device < s->device_count)
        return XD_OK;
    return xd_fail(err, XD_INVALID, 0, "copy", "%s_device is %d; allowed: %d (the host) to %d", side, device, XD_HOST,
                   s->device_count - 1);
}

static int check_side(const sim *s, int device, uint64_t address, uint64_t pitch, const xd_transfer *t, xd_error *err)
{
    uint64_t bytes;
    if (t->height > 1 && pitch < t->width)
        return xd_fail(err, XD_INVALID, 0, "copy", "a pitch of %" PRIu64 " is less than the width, %" PRIu64, pitch,
                       t->width);
    if (__builtin_mul_overflow(t->height - 1, pitch, &bytes) || __builtin_add_overflow(bytes, t->width, &bytes))
        return xd_fail(err, XD_INVALID, 0, "copy", "%" PRIu64 " rows, %" PRIu64 " bytes apart, fit no address space",
                       t->height, pitch);
    return sim_memory_check(s, device, address, bytes, UINT64_MAX, "copy", err);
}

/* The stream's device needs access to the other one, whichever way the bytes go. */
static bool is_unpeered(const sim *s, int device, const xd_transfer *t)
{
    int src = t->src_device, dst = t->dst_device;
    if (src == dst || src == XD_HOST || dst == XD_HOST)
        return false;
    return !s->peer_on[device * s->device_count + (src == device ? dst : src)];
}

static int check_copy(const sim *s, int device, const xd_transfer *t, xd_error *err)
{
    if (!t->width || !t->height)
        return xd_fail(err, XD_INVALID, 0, "copy", "%" PRIu64 " rows of %" PRIu64 " bytes; both must be above 0",
                       t->height, t->width);
    int status = check_device(s, t->src_device, "src", err);
    if (!status)
        status = check_device(s, t->dst_device, "dst", err);
    if (!status && t->src_device != device && t->dst_device != device)
        status = xd_fail(err, XD_INVALID, 0, "copy", "from device %d to device %d on a stream of device %d",
                         t->src_device, t->dst_device, device);
    if (!status)
        status = check_side(s, t->src_device, t->src, t->src_pitch, t, err);
    if (!status)
        status = check_side(s, t->dst_device, t->dst, t->dst_pitch, t, err);
    if (!status && is_unpeered(s, device, t) && s->config.unpeered == XD_SIM_UNPEERED_REFUSED)
        status = xd_fail(err, XD_NO_PEER, 0, "copy", "device %d has no access to the memory of device %d", device,
                         t->src_device == device ? t->dst_device : t->src_device);
    return status;
}

static void name_copy(sim_op *op)
{
    static const char *const host = "host";
    char src[16], dst[16];
    snprintf(src, sizeof src, "%d", op->u.transfer.src_device);
    snprintf(dst, sizeof dst, "%d", op->u.transfer.dst_device);
    snprintf(op->label, sizeof op->label, "copy %s>%s", op->u.transfer.src_device == XD_HOST ? host : src,
             op->u.transfer.dst_device == XD_HOST ? host : dst);
}

int sim_copy(xd_driver *driver, int device, void *handle, const xd_transfer *transfer, xd_error *err)
{
    static const char operation[] = "copy";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = check_copy(s, device, transfer, err);
    if (!status) {
        sim_op *op = sim_new_op(s, SIM_COPY, stream, operation, err);
        if (op) {
            op->u.transfer = *transfer;
            op->bytes = transfer->width * transfer->height;
            name_copy(op);
            bool waits = is_unpeered(s, device, transfer);
            if (waits)
                status = sim_refuse_capture(stream, operation, err);
            if (!status)
                status = sim_submit(s, op, s->config.costs.copy, NULL, 0, err);
            else
                sim_op_free(op);
            if (!status && !stream->capture) {
                bool blocks = sim_fault_hits(s, XD_SIM_BLOCK_COPY, transfer->src_device, transfer->dst_device);
                if (blocks || waits)
                    status = sim_block_on(s, stream, operation, err);
            }
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

int sim_fill(xd_driver *driver, int device, void *handle, uint64_t address, int byte, uint64_t bytes, xd_error *err)
{
    static const char operation[] = "fill";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = sim_memory_check(s, device, address, bytes, UINT64_MAX, operation, err);
    if (!status) {
        sim_op *op = sim_new_op(s, SIM_FILL, stream, operation, err);
        if (op) {
            op->u.fill.address = address;
            op->u.fill.byte = byte;
            op->bytes = bytes;
            snprintf(op->label, sizeof op->label, "fill");
            status = sim_submit(s, op, s->config.costs.fill, NULL, 0, err);
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

static int check_ranges(const sim *s, const xd_kernel *kernel, xd_error *err)
{
    int status = XD_OK;
    for (size_t i = 0; i < kernel->range_count && !status; i++)
        if (kernel->ranges[i].bytes)
            status = sim_memory_check(s, kernel->ranges[i].device, kernel->ranges[i].address, kernel->ranges[i].bytes,
                                      UINT64_MAX, "launch", err);
    return status;
}

int sim_launch(xd_driver *driver, int device, void *handle, const xd_kernel *kernel, xd_error *err)
{
    static const char operation[] = "launch";
    sim *s = sim_of(driver);
    sim_stream *stream;
    pthread_mutex_lock(&s->lock);
    int status = sim_enter(s, device, handle, operation, &stream, err);
    if (!status)
        status = check_ranges(s, kernel, err);
    if (!status) {
        sim_op *op = sim_new_op(s, SIM_KERNEL, stream, operation, err);
        if (op) {
            op->u.kernel.run = kernel->run;
            op->u.kernel.drop = kernel->drop;
            op->u.kernel.arg = kernel->arg;
            op->duration = kernel->cost;
            snprintf(op->label, sizeof op->label, "%s", kernel->label && *kernel->label ? kernel->label : "kernel");
            status = sim_submit(s, op, s->config.costs.launch, kernel->ranges, kernel->range_count, err);
        } else {
            status = XD_NO_HOST_MEMORY;
        }
    }
    pthread_mutex_unlock(&s->lock);
    if (status && kernel->drop)
        kernel->drop(kernel->arg);
    return status;
}
