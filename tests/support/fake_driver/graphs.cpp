// Graphs of the fake driver, made by capture or node by node: their nodes run one behind the other.
#include "driver.hpp"

namespace {

// Conditions keep the value that they are made with: no kernel here sets one. A while body therefore runs once.
auto &conditions = *new std::map<uint64_t, unsigned>;

struct ConditionalParameters {
    int type, reserved[3];
    uint64_t handle;
    int kind;
    unsigned size;
    void **bodies;
    void *context;
};

}  // namespace

API Result cuGraphCreate(void **graph, unsigned) { return *graph = new Graph, 0; }
API Result cuGraphDestroy(void *) { return 0; }
API Result cuGraphExecDestroy(void *) { return 0; }
API Result cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long) { return *made = graph, 0; }
API Result cuStreamBeginCaptureToGraph(void *stream, void *graph, void **, const void *, size_t, int) {
    return of(stream)->capturing = static_cast<Graph *>(graph), of(stream)->last = nullptr, 0;
}
API Result cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *, void **, void ***nodes, size_t *count) {
    return *status = 1, *nodes = &of(stream)->last, *count = of(stream)->last != nullptr, 0;
}
API Result cuStreamEndCapture(void *stream, void **graph) {
    return *graph = of(stream)->capturing, of(stream)->capturing = nullptr, 0;
}
API Result cuGraphExecKernelNodeSetParams_v2(void *, void *handle, void *const *given) {
    auto *node = static_cast<Node *>(handle);  // given: function, shape in 28 bytes, parameters
    void *const *parameters = static_cast<void *const *>(given[5]);
    node->kernel = static_cast<Kernel *>(given[0]);
    const char *from = static_cast<const char *>(parameters[0]);
    return node->parameters.assign(from, from + node->kernel->size), 0;
}
API Result cuGraphConditionalHandleCreate(uint64_t *handle, void *, void *, unsigned value, unsigned flags) {
    *handle = 1000 + conditions.size();
    conditions[*handle] = flags ? value : 0;
    return 0;
}
API Result cuGraphAddNode_v2(void **made, void *graph, void **, const void *, size_t, ConditionalParameters *given) {
    if (given->type != 13 || !conditions.count(given->handle)) return 1;
    auto node = std::make_unique<Node>(Node{nullptr, {}, given->handle, given->kind});
    for (unsigned i = 0; i < given->size; ++i) node->bodies.push_back(new Graph);
    given->bodies = reinterpret_cast<void **>(node->bodies.data());
    *made = node.get();
    return static_cast<Graph *>(graph)->nodes.push_back(std::move(node)), 0;
}
API Result cuGraphLaunch(void *graph, void *stream) {
    for (auto &node : static_cast<Graph *>(graph)->nodes) {
        if (!node->bodies.empty()) {
            const unsigned value = conditions[node->condition];
            const size_t body = node->kind == 2 ? value : value ? 0 : 1;
            if (body < node->bodies.size())
                if (Result result = cuGraphLaunch(node->bodies[body], stream)) return result;
            continue;
        }
        size_t size = node->parameters.size();
        void *extra[] = {reinterpret_cast<void *>(1), node->parameters.data(), reinterpret_cast<void *>(2), &size, nullptr};
        if (Result result = start(node->kernel, stream, extra)) return result;
    }
    return 0;
}
