# A microbatch, and its way through a stage and over a hop; executor/stages.py has the order of it all.

cdef class Epoch:
    cdef public Microbatch failed

    @property
    def over(self):
        return self.failed is not None and self.failed.ticket is not None and self.failed.ticket() is None


cdef class Microbatch:
    cdef readonly Py_ssize_t index, turn
    cdef readonly Epoch epoch
    cdef readonly Lease exit
    cdef readonly Event end
    cdef public object error
    cdef public bint cancelled
    cdef public Activation output
    cdef public object ticket

    def __init__(self, Py_ssize_t index, Py_ssize_t turn, Epoch epoch not None, Events ends not None):
        self.index, self.turn, self.epoch, self.exit = index, turn, epoch, ends.lend()
        self.end = self.exit.item

    @property
    def stopped(self):
        cdef Microbatch failed = self.epoch.failed
        return failed is not None and failed.index <= self.index

    def fail(self, error):
        cdef Microbatch failed = self.epoch.failed
        if self.error is None:
            self.error = error
        if failed is None or self.index < failed.index:
            self.epoch.failed = self

    def outcome(self):
        cdef Microbatch failed = self.epoch.failed
        if self.error is not None or failed is None or failed.index > self.index:
            return self.error
        return errors.Cancelled(
            f"microbatch {self.index}: cancelled, because microbatch {failed.index} failed: {failed.error}"
        )


cdef class StageCore:
    cdef readonly Runtime runtime
    cdef readonly Stream stream
    cdef readonly SlotRing slots
    cdef readonly Outputs outputs
    cdef readonly list ends
    cdef readonly list streams
    cdef readonly int index, device, in_flight
    cdef public bint is_last, kept
    cdef public Activation output
    cdef public object fn, sync_check, work
    cdef Stream tail  # where the microbatch that is being queued ends
    cdef Event done

    def __init__(self, Stream stream not None, SlotRing slots not None, Outputs outputs not None, int index,
                 int in_flight):
        self.runtime, self.stream, self.device, self.index = stream.runtime, stream, stream.device, index
        self.slots, self.outputs, self.in_flight = slots, outputs, in_flight
        self.ends = [self.runtime.event() for _ in range(in_flight)]
        self.streams, self.tail, self.done = [stream], stream, self.runtime.event()

    def run(self, Microbatch batch not None, Slot slot not None, Value incoming not None):
        return self.queue(batch, slot, incoming)

    cdef Activation queue(self, Microbatch batch, Slot slot, Value incoming):
        cdef Activation outgoing
        self.tail = self.stream
        self.stream.wait_for(slot.arrived)
        self.outputs.settle(batch.turn)
        outgoing = self.work(self, batch, slot, incoming)
        self.leave(batch, slot)
        outgoing.ready = slot.free
        if self.kept:
            self.output = outgoing
        return outgoing

    cpdef leave(self, Microbatch batch, Slot slot):
        if self.is_last:
            slot.lent, slot.free = batch.exit, batch.end
        else:
            slot.free = self.ends[batch.turn % self.in_flight]
        slot.free.record_in(self.tail)

    def aside(self):
        self.tail = self.streams[len(self.streams) - 1]
        self.done.record_in(self.stream)
        self.tail.wait_for(self.done)
        return self.tail

    def close(self):
        for stream in self.streams:
            stream.close()
        for event in (*self.ends, self.done):
            event.close()


cdef class Hop:
    cdef Link link
    cdef Layout layout  # of the latest microbatch
    cdef readonly StageCore producer, consumer

    def __init__(self, Link link not None, StageCore producer not None, StageCore consumer not None):
        self.link, self.producer, self.consumer = link, producer, consumer

    def run(self, Microbatch batch not None, Activation source not None):
        cdef Slot slot
        self.layout = source.value.layout
        slot = self.consumer.slots.place(batch.turn, self.layout.nbytes)
        deliver(self.link, source, slot, self.producer.outputs, batch.turn)
        return self.consumer.queue(batch, slot, source.value)

    def sent(self):
        return [(self.producer.device, self.layout.nbytes if self.layout is not None else 0)]

    def close(self):
        pass


cdef class Order:
    cdef object lock
    cdef unsigned long owner

    def __init__(self):
        self.lock = Lock()

    def run(self, act, *args):
        if self.owner == PyThread_get_thread_ident():
            raise errors.InvalidArgument("a stage cannot submit to its own executor, or close it")
        self.lock.acquire()  # Ctrl-C cannot come between this and the next line, as it could in Python
        try:
            self.owner = PyThread_get_thread_ident()
            return act(*args)
        finally:
            self.owner = 0
            self.lock.release()
