/* The host bus: all copies between host and devices share its rate. Each gets what it can use, or else an equal part of
   what the others leave; whenever one comes or goes, the ends of the others move. */
#include "internal.h"

static void settle_flows(sim *s)
{
    for (sim_op *op = s->flows; op; op = op->flow_next) {
        unsigned __int128 moved = (unsigned __int128)op->share * (s->now - op->since);
        op->left = moved < op->left ? op->left - moved : 0;
        op->since = s->now;
    }
}

static void give(sim *s, sim_op *op, uint64_t share)
{
    if (share == op->share)
        return;
    op->share = share;
    sim_schedule(s, op, s->now + (uint64_t)((op->left + share - 1) / share));
}

static void share_bus(sim *s)
{
    uint64_t rate = s->config.bus_rate, count = 0;
    for (sim_op *op = s->flows; op; op = op->flow_next) {
        op->satisfied = rate == 0;
        if (op->satisfied)
            give(s, op, op->cap);
        else
            count++;
    }
    for (bool changed = true; changed && count;) {
        changed = false;
        uint64_t fair = rate / count;
        for (sim_op *op = s->flows; op; op = op->flow_next)
            if (!op->satisfied && op->cap <= fair) {
                op->satisfied = changed = true;
                give(s, op, op->cap);
                rate -= op->cap;
                count--;
            }
    }
    for (sim_op *op = s->flows; op; op = op->flow_next)
        if (!op->satisfied)
            give(s, op, rate / count ? rate / count : 1);
}

void sim_bus_join(sim *s, sim_op *op)
{
    settle_flows(s);
    op->left = (unsigned __int128)op->bytes * SIM_SECOND;
    op->share = 0;
    op->since = s->now;
    op->flow_next = s->flows;
    s->flows = op;
    share_bus(s);
}

void sim_bus_leave(sim *s, sim_op *op)
{
    settle_flows(s);
    sim_op **at = &s->flows;
    while (*at != op)
        at = &(*at)->flow_next;
    *at = op->flow_next;
    share_bus(s);
}
