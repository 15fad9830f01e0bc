/* Handles are numbers, not addresses: (generation, place in the table, kind). A stale or foreign one is not found. */
#include "internal.h"

#include <stdlib.h>

#define KIND_BITS 2u
#define PLACE_BITS 26u
#define NONE UINT32_MAX

void sim_table_init(sim_table *table, uint32_t kind)
{
    *table = (sim_table){.first_free = NONE, .kind = kind};
}

void sim_table_clear(sim_table *table)
{
    free(table->slots);
    sim_table_init(table, table->kind);
}

static sim_slot *slot_of(const sim_table *table, const void *handle)
{
    uint64_t value = (uint64_t)(uintptr_t)handle;
    uint64_t place = (value >> KIND_BITS) & ((1u << PLACE_BITS) - 1);
    if ((value & ((1u << KIND_BITS) - 1)) != table->kind || place >= table->count)
        return NULL;
    sim_slot *slot = &table->slots[place];
    if (!slot->object || slot->generation != value >> (KIND_BITS + PLACE_BITS))
        return NULL;
    return slot;
}

int sim_table_add(sim_table *table, void *object, void **handle)
{
    uint32_t place = table->first_free;
    if (place == NONE) {
        if (table->count == table->capacity) {
            uint32_t capacity = table->capacity ? 2 * table->capacity : 64;
            if (capacity > 1u << PLACE_BITS)
                return XD_NO_HOST_MEMORY;
            sim_slot *slots = realloc(table->slots, capacity * sizeof *slots);
            if (!slots)
                return XD_NO_HOST_MEMORY;
            table->slots = slots;
            table->capacity = capacity;
        }
        place = table->count++;
        table->slots[place].generation = 1;
    } else {
        table->first_free = table->slots[place].next_free;
    }
    sim_slot *slot = &table->slots[place];
    slot->object = object;
    uint64_t value = ((uint64_t)slot->generation << (KIND_BITS + PLACE_BITS)) | ((uint64_t)place << KIND_BITS) | table->kind;
    *handle = (void *)(uintptr_t)value;
    return XD_OK;
}

void *sim_table_find(const sim_table *table, const void *handle)
{
    const sim_slot *slot = slot_of(table, handle);
    return slot ? slot->object : NULL;
}

void sim_table_remove(sim_table *table, const void *handle)
{
    sim_slot *slot = slot_of(table, handle);
    if (!slot)
        return;
    slot->object = NULL;
    slot->generation++;
    slot->next_free = table->first_free;
    table->first_free = (uint32_t)(slot - table->slots);
}
