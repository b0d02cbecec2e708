// One session's hot path on its GPU, or GPUs: applies records by driver calls, tracks completion, sends answers.
// rgpu/server/device/cuda/engine.py is its Python side.
//
// Threads: one applies (feed, apply and every table change); one sends (take); one polls; any may query progress or
// wait. `mutex_` guards streams' progress, staging and answers. Only the applying thread reads and changes the tables;
// it changes them under the mutex because the poller reads streams.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "times/activity.hpp"
#include "driver.hpp"
#include "engine_parts.hpp"
#include "engine_steps.hpp"
#include "records.hpp"
#include "staging.hpp"

namespace rgpu {

class Engine {
   public:
    explicit Engine(CUcontext context) : context_(context), staging_(driver_) {}
    ~Engine();
    std::string open(size_t ring, size_t arena);
    void close();

    // -- tables: the applying thread only ------------------------------------
    void add_context(uint64_t number, CUcontext handle) { contexts_[number] = handle; }
    void remove_context(uint64_t number) { contexts_.erase(number); }
    void add_stream(uint64_t number, CUstream handle, CUcontext context);
    bool remove_stream(uint64_t number);  // when its work is complete
    void add_event(uint64_t number, CUevent handle);
    void remove_event(uint64_t number);
    uint64_t event_recorded(uint64_t number);
    void forget_records();
    void add_module(uint64_t number, const Function *functions, size_t count);
    void remove_module(uint64_t number) { modules_.erase(number); }
    void add_graph(uint64_t number, Graph graph) { graphs_[number] = graph; }
    void remove_graph(uint64_t number) { graphs_.erase(number); }
    // Counts up before and after each launch of a kernel that may print: the same even number read twice means none
    // between.
    uint64_t printing_launches() const { return printing_launches_.load(std::memory_order_acquire); }
    // The events are recorded right before the work that the next call submits to a stream, and right behind it.
    void time(CUevent first, CUevent last) { timed_ = {first, last}; }
    // Whether they were recorded since time(); if not, the next call is not timed any more.
    bool timed() { return !std::exchange(timed_, {}).first; }
    // CUPTI's correlation id of the call that was timed last; 0: none is known.
    uint32_t traced() { return std::exchange(traced_, 0); }

    // -- timed calls (times/timed.cpp) ------------------------------------------
    // Times are measured from it for a second; then Python applies the next timed call, and makes a new one.
    void time_base(CUcontext context, TimeBase base, uint64_t clock);
    // After Took::times: (u64 seq, i32 result, u32 bytes of the reply, reply) for each answer; returns the bytes written.
    size_t take_times(uint8_t *out, size_t room);
    bool times_drained(uint64_t timeout_ns);  // whether all are answered

    bool allocated() const { return allocated_.load(std::memory_order_acquire); }
    void add_range(CUdeviceptr address, uint64_t size);
    bool remove_range(CUdeviceptr address);
    bool contains(CUdeviceptr address, uint64_t size);

    // -- records (feed.cpp) ----------------------------------------------------
    void feed(const uint8_t *data, size_t size, Step &step);
    // Whether these bytes are a few records, the next ones, that feed() applies at once: without waiting for the device,
    // and without handing any back. They may begin within a payload of `memcpy_h2d`, and end within another. `payload`:
    // the last record's, whole, which lies elsewhere; null: none does.
    bool prompt(const uint8_t *data, size_t size, const uint8_t *payload, size_t payload_size);
    bool interrupted() const { return interrupts_.load(std::memory_order_acquire) != 0; }
    void passed(uint64_t seq);        // the caller applied the record that feed() returned
    void position(uint64_t applied);  // the session was rebuilt up to there
    void reset();                     // a new connection: the stream of records begins anew
    // Each call's position is stored there before it is applied: it then outlives this process.
    void keep_place(uint64_t *begun) { begun_ = reinterpret_cast<std::atomic<uint64_t> *>(begun); }
    void set_foreign(const uint64_t *seqs, size_t count);
    void pass_all(bool on) { pass_all_ = on; }
    void interrupt(bool on);
    uint64_t applied() const { return applied_.load(std::memory_order_acquire); }

    // -- one call, from Python (apply.cpp) --------------------------------------
    CUresult apply(uint16_t call, uint64_t seq, const uint8_t *args, size_t args_len, const uint8_t *payload,
                   size_t payload_len);
    void boundary(uint64_t stream);                         // work that may stop the stream follows
    void submitted(uint64_t stream, uint64_t seq);          // the caller itself submitted work to the stream
    void stops(uint64_t stream, uint64_t seq);              // the same of a host function
    void returned(uint64_t seq);                            // that function has returned; any thread
    CUresult mark(uint64_t stream, uint64_t seq, bool all);  // a callback when that point is reached
    CUresult mark_context(CUcontext context, uint64_t seq);   // … by all streams of a GPU

    // -- the order of issue (order.cpp) -------------------------------------------
    void order(bool on);  // any thread
    // The applying thread: work for `stream` follows. 1: it is next, since the earlier work of other streams is
    // complete, or the program's own events make the stream wait for it; 0: none of that completed within the patience;
    // -1: interrupted.
    int in_order(uint64_t stream, uint64_t patience_ns);
    void pass_beside(uint64_t stream);  // the next call is given to it, before others' work is complete
    // Whether only host functions that have not returned, and work behind them, keep the stream from its turn.
    bool beside(uint64_t stream);
    // Whether work follows all that was issued before it, so that no observation has to be waited for.
    bool covers();
    bool put_off(uint64_t seq);          // whether the wait for that observed call is put off until settle()
    int settle(uint64_t timeout_ns, bool interruptible);  // as wait_until: all calls put off are complete
    uint64_t reached();  // grows with each completion that was seen
    // Calls that the program is usually ahead of its work. feed() returns `behind` before a call for another stream
    // while clearly more of them are under way. UINT32_MAX: never.
    void usual(uint32_t calls) { usual_.store(calls, std::memory_order_relaxed); }  // any thread
    uint32_t ahead();    // calls submitted and not complete; UINT32_MAX: as many as allowed

    // -- progress (completion.cpp) -----------------------------------------------
    bool is_complete(uint64_t seq);
    bool wait_complete(uint64_t seq, uint64_t timeout_ns);
    bool drain(uint64_t timeout_ns);
    uint64_t worked();  // ns so far with work on the device
    void rest(uint64_t stream, bool resting);  // whether it waits at a gate, while it has work (resting.cpp)
    // After `ahead`: whether more may be submitted to the device; waits up to the timeout.
    bool may_go_on(uint64_t timeout_ns);
    void host_functions(bool open) { host_functions_.store(open, std::memory_order_relaxed); }  // any thread
    bool launched(uint64_t seq, uint64_t *module, uint32_t *function);
    size_t progress(uint64_t *pending, size_t pending_size, uint64_t *streams, size_t streams_size, size_t *pairs);
    size_t watermark(uint8_t *body, size_t size, bool whole, int broken);
    int error() const { return error_.load(std::memory_order_acquire); }
    void set_broken(int result) { broken_.store(result, std::memory_order_release); }
    void fail(CUresult result);

    // -- answers (answers.cpp) ------------------------------------------------------
    void attach();
    void detach();
    void take(Out &out, uint64_t timeout_ns);             // the sender's
    static bool look(uint64_t spin_ns, int fd);           // whether `fd` became readable; spins instead of sleeping
    // The applying thread's: it polls for completion itself. `several`: also answers of a few pieces; when the first is
    // taken, the others are there, and no other thread may take any.
    void take_here(Out &out, uint64_t spin_ns, int fd, bool several);
    void take_callback(Out &out, uint64_t timeout_ns);
    void release(Answer *answer);
    void wake();
    void stop();
    size_t retained(uint64_t *seqs, size_t size);
    Answer *retained_answer(uint64_t seq);

    // -- memory of other processes (windows.cpp): the applying thread only -------------
    int area(const uint8_t *&data, size_t &size) const { return staging_.area(data, size); }
    void share_area(bool on) { area_shared_.store(on, std::memory_order_relaxed); }
    int pin(const uint8_t *data, size_t size);  // 1: done; 0: refused; -1: not possible while the device works
    bool unpin(const uint8_t *data);            // false: not possible while the device works
    bool pinned(const uint8_t *data, size_t size) const;

    uint8_t *take_frame();
    void give_frame(uint8_t *data);
    void use();  // make the context current in this thread
    void use(CUcontext context);  // the context of one of several GPUs

   private:
    // feed.cpp
    Bad examine(const uint8_t *data, size_t have, RecordView &view, size_t &need);
    Came process(const RecordView &view, Step &step, Bad &bad);
    Outcome apply_hot(const RecordView &view, Bad &bad);
    bool streams_payload(uint16_t call) const;
    bool timed_here(const RecordView &view, RecordView &inner);
    Outcome apply_timed(const RecordView &inner, Bad &bad);
    CUevent timing_event(CUcontext context);
    void time_calls();
    bool settle(TimedCall &timed);
    void hand_over(const RecordView &view, Step &step);

    // apply.cpp
    CUresult call(const RecordView &view, bool callback, bool &decoded);
    CUresult launch(const wire::Launch &call, uint64_t seq);
    CUresult launch_graph(const wire::GraphLaunch &call, uint64_t seq);
    CUresult memset(const wire::Memset &call, uint64_t seq);
    CUresult copy_out(uint64_t seq, uint64_t stream, CUdeviceptr source, uint64_t pitch, uint64_t width,
                      uint64_t height, bool callback);
    CUresult copy(uint64_t seq, uint64_t stream, CUdeviceptr destination, uint64_t destination_pitch,
                  CUdeviceptr source, uint64_t source_pitch, uint64_t width, uint64_t height);
    CUresult record_event(const wire::EventRecord &call, uint64_t seq);
    CUresult wait_event(const wire::StreamWaitEvent &call, uint64_t seq);
    CUresult synchronize(uint64_t seq, uint64_t stream, bool callback);
    CUresult synchronize_all(uint64_t seq, CUcontext context, bool callback);  // null: of every GPU
    CUresult await_streams(uint64_t seq, const std::vector<Stream *> &those, bool callback);
    CUresult synchronize_event(uint64_t seq, uint64_t event, bool callback);
    bool rectangle(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height);
    Stream *stream(uint64_t number);
    void argument_error(uint16_t call, uint64_t seq, CUresult result);

    // order.cpp
    bool behind(const RecordView &view, uint64_t &stream);
    bool stay_close(const RecordView &view);
    template <typename Predicate>
    int wait_on_progress(Predicate predicate, uint64_t patience_ns);
    bool work_of(const RecordView &view, uint64_t &stream);  // whether a hot call submits work to a stream, and which
    bool behind_all(const Stream &stream);  // whether its work follows all that was given to the other streams
    static bool follows(const Stream &stream, const Stream &other, uint64_t tick);
    bool covers_locked();
    Past &past(Stream &stream);
    void remember_past(Event &event, Stream &stream);
    void comes_behind(Stream &stream, const Event &event);
    int mark_every() const;

    // inflow.cpp
    bool open_inflow(const RecordView &view, Bad &bad);
    size_t inflow(const uint8_t *data, size_t size, Frame *frame, bool &interrupted, Bad &bad);
    bool room_for(size_t slots);
    bool stage(const uint8_t *data, size_t size, Frame *frame, bool &interrupted, size_t &used);
    void hold(Frame *frame);
    void submit_slot();
    void end_inflow();
    CUresult put(const void *from, size_t size);

    // completion.cpp
    CUresult keep(Stream &stream, CUresult result, uint64_t seq);  // a driver call was made for seq
    void submit(Stream &stream, uint64_t seq);
    void activate(Stream &stream);
    void mark_stream(Stream &stream);
    void boundary(Stream &stream);
    // resting.cpp
    void tally();
    void take_rests();
    void before_wait(Stream &stream);
    void waits(Stream &stream, const Event &event);
    bool behind_a_gate(Stream &stream, int chain);
    bool look_at_streams();
    bool collect();
    void reach(Stream &stream, uint64_t tick, CUresult result);
    void act(Action &action, CUresult result);
    bool complete_locked(uint64_t seq);
    bool idle_locked();
    bool unfinished(const EventWait &wait);
    void settle_event(CUevent event);
    void reap();
    template <typename Predicate>
    int wait_until(Predicate predicate, uint64_t deadline, bool interruptible);
    Pace keep_pace();
    Pace wait_for_room();
    void poll();
    void measure(size_t completed);

    // answers.cpp
    Answer *expect(uint64_t seq, bool callback, bool timed = false);
    void queue_times(Answer *answer);
    void finish(Answer *answer, CUresult result);
    void queue_piece(Answer *answer, uint32_t index);
    void drop(Answer *answer);
    void observed(uint64_t seq);
    void forget_answer(uint64_t seq);
    void answer_now(uint64_t seq, CUresult result, bool callback);
    bool pop(Out &out);
    bool may_take_here(bool several) const;
    static bool few_pieces(const Answer &answer);
    void forget_queue();
    void fill(Out &out, Answer *answer, uint32_t index);

    CUcontext context_;
    bool several_ = false;  // there are streams of other contexts
    std::unordered_map<uint64_t, CUcontext> contexts_;  // the program's contexts, by number
    Driver driver_;
    std::mutex mutex_;
    Staging staging_;
    std::unordered_map<uint64_t, std::unique_ptr<Stream>> streams_;
    std::unordered_map<uint64_t, Event> events_;
    std::unordered_map<uint64_t, std::vector<Function>> modules_;
    std::unordered_map<uint64_t, Graph> graphs_;  // executable ones
    std::map<CUdeviceptr, uint64_t> ranges_;
    CUdeviceptr last_range_ = 0;
    uint64_t last_range_size_ = 0;
    std::vector<std::unique_ptr<Stream>> leaving_;  // destroyed, with work left
    std::vector<Stream *> active_;
    std::vector<EventWait> event_waits_;
    std::unordered_map<CUcontext, std::vector<CUevent>> spare_;

    std::map<const uint8_t *, size_t> windows_;  // pinned windows: begin → bytes
    std::atomic<uint64_t> applied_{0};
    std::atomic<uint64_t> unseen_{0}, *begun_ = &unseen_;
    std::vector<uint8_t> gathered_;
    bool gathered_done_ = false;
    uint64_t offset_ = 0;
    Inflow inflow_;
    std::unordered_set<uint64_t> foreign_;
    bool pass_all_ = false;
    std::atomic<int> interrupts_{0};
    std::atomic<int> error_{0}, broken_{0};
    std::atomic<uint64_t> printing_launches_{0};  // of kernels that may print, twice each: odd during one
    struct {
        CUevent first = nullptr, last = nullptr;
    } timed_;
    uint32_t traced_ = 0;
    template <class Give>
    CUresult timing(CUstream stream, Give give) {
        const auto [first, last] = std::exchange(timed_, {});
        if (!first) [[likely]] return give();
        driver_.event_record(first, stream);
        const CUresult result = give();
        traced_ = activity::last_call();
        driver_.event_record(last, stream);
        return result;
    }
    std::unordered_map<CUcontext, TimeBase> bases_;  // the applying thread's
    uint64_t clock_ = 0;
    std::unordered_map<CUcontext, std::vector<CUevent>> spare_timing_;
    std::deque<TimedCall *> ended_;     // their records may be missing yet
    std::deque<Answer *> times_queue_;  // to be taken
    size_t timed_open_ = 0;             // not answered
    uint64_t missing_since_ = 0;        // since when the oldest one's record has been missing, ns; 0: it is not
    uint64_t without_until_ = 0;        // until when no record is waited for, ns
    std::condition_variable times_;
    std::thread timer_;                 // started with the first timed call
    std::atomic<bool> allocated_{false};  // a kernel that may allocate was launched
    uint64_t bugs_ = 0, bug_seq_ = 0;
    int bug_result_ = 0;
    uint32_t bug_call_ = 0;
    bool direct_ = false;           // inside apply(): errors are returned, nothing interrupts
    CUresult direct_result_ = 0;
    uint64_t ahead_at_ = ~0ull;     // position at which feed() returned `ahead`, …
    uint64_t ahead_until_ = 0;      // … and until when that lasts, ns
    uint64_t patient_until_ = 0;    // position up to which a stalled device is not waited for again

    uint64_t loose_until_ = 0, loose_for_ = 1024;  // position up to which streams overtake freely; the next time

    std::atomic<bool> host_functions_{false};  // some are open
    std::atomic<bool> area_shared_{false};     // the program's side reads answers in the area

    std::atomic<bool> ordered_{false};
    std::atomic<uint64_t> catch_up_{0};  // number of catch-ups
    uint64_t identities_ = 0;            // of streams, assigned so far
    std::atomic<uint32_t> usual_{UINT32_MAX};
    std::atomic<uint64_t> work_stream_{kNoStream};  // in order: the stream of the last work
    uint64_t reached_ = 0;
    uint64_t beside_ = 0;              // the last call that was passed beside unfinished work; 0: none is under way
    std::pair<uint64_t, uint64_t> passed_{kNoStream, 0};  // stream and position of the call that was passed last
    std::deque<uint64_t> put_off_;     // observed calls, by position; the applying thread's
    std::atomic<uint64_t> waited_ns_{0};

    std::atomic<size_t> pending_{0};  // calls that were submitted and are not complete
    size_t ahead_ = 256;        // how many are allowed
    bool turns_ = false;        // a device that others share: it does all of them in one turn
    std::atomic<bool> held_back_{false};  // the applying thread waits for room
    uint64_t busy_since_ = 0;   // last progress, or when it became busy
    double call_ns_ = 0;        // measured: device time of a call
    size_t resting_ = 0;  // of the active streams
    std::atomic<bool> gates_{false};  // a stream has been at one
    std::mutex rests_mutex_;  // never held while anything else is waited for
    std::vector<std::pair<uint64_t, bool>> rests_, resting_now_;  // calls of `rest` that are not yet counted
    std::vector<uint64_t> returned_, returned_now_;               // the same of `returned`
    std::unordered_set<uint64_t> functions_;  // host functions that have not returned, as far as is counted
    bool works_ = false;
    uint64_t active_since_ = 0, worked_ns_ = 0;  // with work on the device: since when now, total before, ns

    std::map<uint64_t, Answer *> retained_;
    std::deque<std::pair<Answer *, uint32_t>> queue_;
    Answer *leaving_now_ = nullptr;  // some of its pieces were taken, not all
    bool leaving_here_ = false;      // by the applying thread
    std::deque<Answer *> callbacks_;
    size_t awaiting_ = 0;
    bool attached_ = false, woken_ = false, progress_ = false, stopped_ = false;
    uint64_t last_watermark_ = 0, last_done_ = 0;
    int last_error_ = 0;
    std::condition_variable out_, callback_, busy_;
    bool here_ = false;  // the applying thread waits for answers itself
    uint64_t awaited_since_ = 0;
    std::thread poller_;
};

void backoff(uint64_t waited_ns);

// 1: the predicate became true; 0: the deadline passed; -1: interrupted. The predicate is evaluated under the mutex.
template <typename Predicate>
int Engine::wait_until(Predicate predicate, uint64_t deadline, bool interruptible) {
    const uint64_t began = now_ns();
    for (uint64_t now = began, looks = 0;; now = now_ns(), ++looks) {
        int got = -2;
        {
            std::lock_guard lock(mutex_);
            if (predicate() || (collect() && predicate())) got = 1;
        }
        if (got == -2 && interruptible && !direct_ && interrupts_.load(std::memory_order_acquire)) got = -1;
        if (got == -2 && now >= deadline) got = 0;
        if (got != -2) {
            if (interruptible && looks) waited_ns_ += now_ns() - began;
            return got;
        }
        backoff(now - began);
    }
}

}  // namespace rgpu
