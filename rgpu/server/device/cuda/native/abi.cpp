// The C ABI that rgpu/server/device/cuda/engine.py loads with ctypes.
#include <cstring>
#include <new>

#include "engine.hpp"
#include "times/activity.hpp"

#define RGPU_API extern "C" __attribute__((visibility("default")))

using rgpu::Engine;

// To be raised when the layouts of Step and Out or the functions below change.
RGPU_API int rge_version() { return 14; }

RGPU_API Engine *rge_open(void *context, uint64_t ring, uint64_t arena, char *error, size_t size) {
    auto *engine = new (std::nothrow) Engine(context);
    if (!engine) return nullptr;
    const std::string why = engine->open(ring, arena);
    if (why.empty()) return engine;
    std::strncpy(error, why.c_str(), size - 1);
    error[size - 1] = 0;
    delete engine;
    return nullptr;
}

RGPU_API void rge_stop(Engine *engine) { engine->stop(); }
RGPU_API void rge_close(Engine *engine) {
    engine->close();
    delete engine;
}

RGPU_API void rge_add_context(Engine *e, uint64_t number, void *handle) { e->add_context(number, handle); }
RGPU_API void rge_remove_context(Engine *e, uint64_t number) { e->remove_context(number); }
RGPU_API void rge_add_stream(Engine *e, uint64_t number, void *handle, void *context) {
    e->add_stream(number, handle, context);
}
RGPU_API int rge_remove_stream(Engine *e, uint64_t number) { return e->remove_stream(number); }
RGPU_API void rge_add_event(Engine *e, uint64_t number, void *handle) { e->add_event(number, handle); }
RGPU_API void rge_remove_event(Engine *e, uint64_t number) { e->remove_event(number); }
RGPU_API uint64_t rge_event_recorded(Engine *e, uint64_t number) { return e->event_recorded(number); }
RGPU_API void rge_add_module(Engine *e, uint64_t number, void *const *handles, const uint32_t *sizes, size_t count,
                             int traits) {
    std::vector<rgpu::Function> functions(count);
    for (size_t i = 0; i < count; ++i) functions[i] = {handles[i], sizes[i], traits};
    e->add_module(number, functions.data(), count);
}
RGPU_API uint64_t rge_printing_launches(Engine *e) { return e->printing_launches(); }
RGPU_API void rge_time(Engine *e, void *first, void *last) { e->time(first, last); }
RGPU_API int rge_timed(Engine *e) { return e->timed(); }
RGPU_API uint32_t rge_traced(Engine *e) { return e->traced(); }
RGPU_API int rge_activity_open(const char *path, char *error, size_t size) {
    const std::string why = rgpu::activity::open(path);
    std::strncpy(error, why.c_str(), size - 1);
    error[size - 1] = 0;
    return why.empty();
}
RGPU_API int rge_activity_record(int on) { return rgpu::activity::record(on); }
RGPU_API void rge_activity_collect() { rgpu::activity::collect(); }
RGPU_API int rge_activity_take(uint32_t correlation, uint64_t complete, uint64_t *start, uint64_t *end) {
    return rgpu::activity::take(correlation, complete, start, end);
}
RGPU_API void rge_time_base(Engine *e, void *context, void *event, uint64_t ns, uint64_t clock, int recorded) {
    e->time_base(context, {event, ns, recorded != 0}, clock);
}
RGPU_API size_t rge_take_times(Engine *e, uint8_t *out, size_t room) { return e->take_times(out, room); }
RGPU_API int rge_times_drained(Engine *e, uint64_t ns) { return e->times_drained(ns); }
RGPU_API int rge_allocated(Engine *e) { return e->allocated(); }
RGPU_API void rge_remove_module(Engine *e, uint64_t number) { e->remove_module(number); }
RGPU_API void rge_add_graph(Engine *e, uint64_t number, void *handle, int traits) {
    e->add_graph(number, {handle, traits});
}
RGPU_API void rge_remove_graph(Engine *e, uint64_t number) { e->remove_graph(number); }
RGPU_API void rge_add_range(Engine *e, uint64_t address, uint64_t size) { e->add_range(address, size); }
RGPU_API int rge_remove_range(Engine *e, uint64_t address) { return e->remove_range(address); }
RGPU_API int rge_contains(Engine *e, uint64_t address, uint64_t size) { return e->contains(address, size); }

RGPU_API void rge_feed(Engine *e, const uint8_t *data, size_t size, rgpu::Step *step) { e->feed(data, size, *step); }
RGPU_API int rge_prompt(Engine *e, const uint8_t *data, size_t size, const uint8_t *payload, size_t payload_size) {
    return e->prompt(data, size, payload, payload_size);
}
RGPU_API int rge_interrupted(Engine *e) { return e->interrupted(); }
RGPU_API void rge_passed(Engine *e, uint64_t seq) { e->passed(seq); }
RGPU_API void rge_position(Engine *e, uint64_t applied) { e->position(applied); }
RGPU_API void rge_keep_place(Engine *e, uint64_t *begun) { e->keep_place(begun); }
RGPU_API uint64_t rge_applied(Engine *e) { return e->applied(); }
RGPU_API void rge_reset(Engine *e) { e->reset(); }
RGPU_API void rge_foreign(Engine *e, const uint64_t *seqs, size_t count) { e->set_foreign(seqs, count); }
RGPU_API void rge_pass_all(Engine *e, int on) { e->pass_all(on); }
RGPU_API void rge_interrupt(Engine *e, int on) { e->interrupt(on); }

RGPU_API void rge_order(Engine *e, int on) { e->order(on); }
RGPU_API void rge_usual(Engine *e, uint32_t calls) { e->usual(calls); }
RGPU_API int rge_in_order(Engine *e, uint64_t stream, uint64_t ns) { return e->in_order(stream, ns); }
RGPU_API void rge_pass_order(Engine *e, uint64_t stream) { e->pass_beside(stream); }
RGPU_API int rge_beside(Engine *e, uint64_t stream) { return e->beside(stream); }
RGPU_API int rge_covers(Engine *e) { return e->covers(); }
RGPU_API int rge_put_off(Engine *e, uint64_t seq) { return e->put_off(seq); }
RGPU_API int rge_settle(Engine *e, uint64_t ns) { return e->settle(ns, false); }
RGPU_API uint64_t rge_reached(Engine *e) { return e->reached(); }
RGPU_API int rge_may_go_on(Engine *e, uint64_t ns) { return e->may_go_on(ns); }
RGPU_API uint32_t rge_ahead(Engine *e) { return e->ahead(); }

RGPU_API int rge_apply(Engine *e, uint32_t call, uint64_t seq, const uint8_t *args, size_t args_len,
                       const uint8_t *payload, size_t payload_len) {
    return e->apply(static_cast<uint16_t>(call), seq, args, args_len, payload, payload_len);
}
RGPU_API void rge_boundary(Engine *e, uint64_t stream) { e->boundary(stream); }
RGPU_API void rge_submitted(Engine *e, uint64_t stream, uint64_t seq) { e->submitted(stream, seq); }
RGPU_API void rge_stops(Engine *e, uint64_t stream, uint64_t seq) { e->stops(stream, seq); }
RGPU_API void rge_returned(Engine *e, uint64_t seq) { e->returned(seq); }
RGPU_API int rge_mark(Engine *e, uint64_t stream, uint64_t seq, int all) { return e->mark(stream, seq, all); }
RGPU_API int rge_mark_context(Engine *e, void *context, uint64_t seq) { return e->mark_context(context, seq); }

RGPU_API int rge_is_complete(Engine *e, uint64_t seq) { return e->is_complete(seq); }
RGPU_API int rge_wait_complete(Engine *e, uint64_t seq, uint64_t ns) { return e->wait_complete(seq, ns); }
RGPU_API int rge_drain(Engine *e, uint64_t ns) { return e->drain(ns); }
RGPU_API void rge_rest(Engine *e, uint64_t stream, int resting) { e->rest(stream, resting != 0); }
RGPU_API void rge_host_functions(Engine *e, int open) { e->host_functions(open != 0); }
RGPU_API uint64_t rge_worked(Engine *e) { return e->worked(); }
RGPU_API size_t rge_progress(Engine *e, uint64_t *pending, size_t pending_size, uint64_t *streams,
                             size_t streams_size, size_t *pairs) {
    return e->progress(pending, pending_size, streams, streams_size, pairs);
}
RGPU_API int rge_launched(Engine *e, uint64_t seq, uint64_t *module, uint32_t *function) {
    return e->launched(seq, module, function);
}
RGPU_API size_t rge_watermark(Engine *e, uint8_t *body, size_t size, int whole, int broken) {
    return e->watermark(body, size, whole, broken);
}
RGPU_API int rge_error(Engine *e) { return e->error(); }
RGPU_API void rge_fail(Engine *e, int result) { e->fail(result); }
RGPU_API void rge_broken(Engine *e, int result) { e->set_broken(result); }

RGPU_API void rge_attach(Engine *e) { e->attach(); }
RGPU_API void rge_detach(Engine *e) { e->detach(); }
RGPU_API void rge_take(Engine *e, rgpu::Out *out, uint64_t ns) { e->take(*out, ns); }
RGPU_API void rge_take_here(Engine *e, rgpu::Out *out, uint64_t ns, int fd, int several) {
    e->take_here(*out, ns, fd, several != 0);
}
RGPU_API int rge_look(uint64_t ns, int fd) { return Engine::look(ns, fd); }
RGPU_API void rge_take_callback(Engine *e, rgpu::Out *out, uint64_t ns) { e->take_callback(*out, ns); }
RGPU_API void rge_release(Engine *e, rgpu::Answer *answer) { e->release(answer); }
RGPU_API void rge_wake(Engine *e) { e->wake(); }
RGPU_API size_t rge_retained(Engine *e, uint64_t *seqs, size_t size) { return e->retained(seqs, size); }
RGPU_API rgpu::Answer *rge_retained_answer(Engine *e, uint64_t seq) { return e->retained_answer(seq); }

RGPU_API int rge_answer_result(rgpu::Answer *answer) { return answer->result; }
RGPU_API size_t rge_answer_reply(rgpu::Answer *answer, uint8_t *out) { return rgpu::write_times(*answer, out); }
RGPU_API size_t rge_answer_pieces(rgpu::Answer *answer) { return answer->pieces.size(); }
RGPU_API const uint8_t *rge_answer_piece(rgpu::Answer *answer, uint32_t index, uint64_t *size) {
    *size = answer->pieces[index];
    return answer->piece(index);
}

RGPU_API int rge_area(Engine *e, const uint8_t **data, size_t *size) { return e->area(*data, *size); }
RGPU_API void rge_share_area(Engine *e, int on) { e->share_area(on); }
RGPU_API int rge_pin(Engine *e, const uint8_t *data, size_t size) { return e->pin(data, size); }
RGPU_API int rge_unpin(Engine *e, const uint8_t *data) { return e->unpin(data); }

RGPU_API uint8_t *rge_take_frame(Engine *e) { return e->take_frame(); }
RGPU_API void rge_give_frame(Engine *e, uint8_t *data) { e->give_frame(data); }
RGPU_API uint64_t rge_frame_size() { return rgpu::kFrameSize; }
