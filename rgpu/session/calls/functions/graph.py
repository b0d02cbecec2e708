"""Driver functions: graphs, conditional nodes and user objects."""

from __future__ import annotations

from rgpu.session.calls.functions.model import ASYNC, LOCAL, function

FUNCTIONS = (
    function(
        "cuDeviceGetGraphMemAttribute", "CUdevice device, CUgraphMem_attribute attr, void *value",
        "cuDeviceGetGraphMemAttribute 11040", LOCAL,
    ),
    function("cuDeviceGraphMemTrim", "CUdevice device", "cuDeviceGraphMemTrim 11040", LOCAL),
    function(
        "cuDeviceSetGraphMemAttribute", "CUdevice device, CUgraphMem_attribute attr, void *value",
        "cuDeviceSetGraphMemAttribute 11040", LOCAL,
    ),
    function(
        "cuGraphAddBatchMemOpNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams", "cuGraphAddBatchMemOpNode 11070", LOCAL,
    ),
    function(
        "cuGraphAddChildGraphNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUgraph childGraph", "cuGraphAddChildGraphNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddDependencies",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies",
        "cuGraphAddDependencies 10000", LOCAL,
    ),
    function(
        "cuGraphAddDependencies_v2",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData, "
        "size_t numDependencies", "cuGraphAddDependencies 12030", LOCAL,
    ),
    function(
        "cuGraphAddEmptyNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies",
        "cuGraphAddEmptyNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddEventRecordNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUevent event", "cuGraphAddEventRecordNode 11010", LOCAL,
    ),
    function(
        "cuGraphAddEventWaitNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUevent event", "cuGraphAddEventWaitNode 11010", LOCAL,
    ),
    function(
        "cuGraphAddExternalSemaphoresSignalNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams", "cuGraphAddExternalSemaphoresSignalNode 11020",
    ),
    function(
        "cuGraphAddExternalSemaphoresWaitNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams", "cuGraphAddExternalSemaphoresWaitNode 11020",
    ),
    function(
        "cuGraphAddHostNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_HOST_NODE_PARAMS_v1 *nodeParams", "cuGraphAddHostNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddKernelNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams", "cuGraphAddKernelNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddKernelNode_v2",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_KERNEL_NODE_PARAMS_v2 *nodeParams", "cuGraphAddKernelNode 12000", LOCAL,
    ),
    function(
        "cuGraphAddMemAllocNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUDA_MEM_ALLOC_NODE_PARAMS_v1 *nodeParams", "cuGraphAddMemAllocNode 11040",
        ASYNC, "memory_map memory_allocate",
    ),
    function(
        "cuGraphAddMemFreeNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUdeviceptr dptr", "cuGraphAddMemFreeNode 11040", LOCAL,
    ),
    function(
        "cuGraphAddMemcpyNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_MEMCPY3D *copyParams, CUcontext ctx", "cuGraphAddMemcpyNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddMemsetNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_MEMSET_NODE_PARAMS_v1 *memsetParams, CUcontext ctx", "cuGraphAddMemsetNode 10000", LOCAL,
    ),
    function(
        "cuGraphAddNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUgraphNodeParams *nodeParams", "cuGraphAddNode 12020",
        LOCAL, "", "semaphore nodes: CUDA_ERROR_NOT_SUPPORTED",
    ),
    function(
        "cuGraphAddNode_v2",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData "
        "*dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams", "cuGraphAddNode 12030",
        LOCAL, "", "semaphore nodes: CUDA_ERROR_NOT_SUPPORTED",
    ),
    function(
        "cuGraphBatchMemOpNodeGetParams", "CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out",
        "cuGraphBatchMemOpNodeGetParams 11070", LOCAL,
    ),
    function(
        "cuGraphBatchMemOpNodeSetParams", "CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams",
        "cuGraphBatchMemOpNodeSetParams 11070", LOCAL,
    ),
    function(
        "cuGraphChildGraphNodeGetGraph", "CUgraphNode hNode, CUgraph *phGraph", "cuGraphChildGraphNodeGetGraph 10000",
        LOCAL,
    ),
    function("cuGraphClone", "CUgraph *phGraphClone, CUgraph originalGraph", "cuGraphClone 10000", LOCAL),
    function(
        "cuGraphConditionalHandleCreate",
        "CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext ctx, unsigned int "
        "defaultLaunchValue, unsigned int flags", "cuGraphConditionalHandleCreate 12030", LOCAL,
    ),
    function("cuGraphCreate", "CUgraph *phGraph, unsigned int flags", "cuGraphCreate 10000", LOCAL),
    function(
        "cuGraphDebugDotPrint", "CUgraph hGraph, const char *path, unsigned int flags", "cuGraphDebugDotPrint 11030",
        LOCAL,
    ),
    function("cuGraphDestroy", "CUgraph hGraph", "cuGraphDestroy 10000", LOCAL),
    function("cuGraphDestroyNode", "CUgraphNode hNode", "cuGraphDestroyNode 10000", LOCAL),
    function(
        "cuGraphEventRecordNodeGetEvent", "CUgraphNode hNode, CUevent *event_out",
        "cuGraphEventRecordNodeGetEvent 11010", LOCAL,
    ),
    function(
        "cuGraphEventRecordNodeSetEvent", "CUgraphNode hNode, CUevent event", "cuGraphEventRecordNodeSetEvent 11010",
        LOCAL,
    ),
    function(
        "cuGraphEventWaitNodeGetEvent", "CUgraphNode hNode, CUevent *event_out", "cuGraphEventWaitNodeGetEvent 11010",
        LOCAL,
    ),
    function(
        "cuGraphEventWaitNodeSetEvent", "CUgraphNode hNode, CUevent event", "cuGraphEventWaitNodeSetEvent 11010",
        LOCAL,
    ),
    function(
        "cuGraphExecBatchMemOpNodeSetParams",
        "CUgraphExec graphExec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams",
        "cuGraphExecBatchMemOpNodeSetParams 11070", LOCAL,
    ),
    function(
        "cuGraphExecChildGraphNodeSetParams", "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph",
        "cuGraphExecChildGraphNodeSetParams 11010", LOCAL,
    ),
    function("cuGraphExecDestroy", "CUgraphExec hGraphExec", "cuGraphExecDestroy 10000", ASYNC, "graph_exec_destroy"),
    function(
        "cuGraphExecEventRecordNodeSetEvent", "CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event",
        "cuGraphExecEventRecordNodeSetEvent 11010", LOCAL,
    ),
    function(
        "cuGraphExecEventWaitNodeSetEvent", "CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event",
        "cuGraphExecEventWaitNodeSetEvent 11010", LOCAL,
    ),
    function(
        "cuGraphExecExternalSemaphoresSignalNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams",
        "cuGraphExecExternalSemaphoresSignalNodeSetParams 11020",
    ),
    function(
        "cuGraphExecExternalSemaphoresWaitNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams",
        "cuGraphExecExternalSemaphoresWaitNodeSetParams 11020",
    ),
    function("cuGraphExecGetFlags", "CUgraphExec hGraphExec, uint64_t *flags", "cuGraphExecGetFlags 12000", LOCAL),
    function(
        "cuGraphExecHostNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS_v1 *nodeParams",
        "cuGraphExecHostNodeSetParams 10020", LOCAL,
    ),
    function(
        "cuGraphExecKernelNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams",
        "cuGraphExecKernelNodeSetParams 10010", LOCAL,
    ),
    function(
        "cuGraphExecKernelNodeSetParams_v2",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v2 *nodeParams",
        "cuGraphExecKernelNodeSetParams 12000", LOCAL,
    ),
    function(
        "cuGraphExecMemcpyNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx",
        "cuGraphExecMemcpyNodeSetParams 10020", LOCAL,
    ),
    function(
        "cuGraphExecMemsetNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS_v1 *memsetParams, CUcontext ctx",
        "cuGraphExecMemsetNodeSetParams 10020", LOCAL,
    ),
    function(
        "cuGraphExecNodeSetParams", "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams",
        "cuGraphExecNodeSetParams 12020", LOCAL,
    ),
    function(
        "cuGraphExecUpdate",
        "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult "
        "*updateResult_out", "cuGraphExecUpdate 10020", LOCAL,
    ),
    function(
        "cuGraphExecUpdate_v2", "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo",
        "cuGraphExecUpdate 12000", LOCAL,
    ),
    function(
        "cuGraphExternalSemaphoresSignalNodeGetParams",
        "CUgraphNode hNode, CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *params_out",
        "cuGraphExternalSemaphoresSignalNodeGetParams 11020",
    ),
    function(
        "cuGraphExternalSemaphoresSignalNodeSetParams",
        "CUgraphNode hNode, const CUDA_EXT_SEM_SIGNAL_NODE_PARAMS *nodeParams",
        "cuGraphExternalSemaphoresSignalNodeSetParams 11020",
    ),
    function(
        "cuGraphExternalSemaphoresWaitNodeGetParams", "CUgraphNode hNode, CUDA_EXT_SEM_WAIT_NODE_PARAMS *params_out",
        "cuGraphExternalSemaphoresWaitNodeGetParams 11020",
    ),
    function(
        "cuGraphExternalSemaphoresWaitNodeSetParams",
        "CUgraphNode hNode, const CUDA_EXT_SEM_WAIT_NODE_PARAMS *nodeParams",
        "cuGraphExternalSemaphoresWaitNodeSetParams 11020",
    ),
    function(
        "cuGraphGetEdges", "CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges",
        "cuGraphGetEdges 10000", LOCAL,
    ),
    function(
        "cuGraphGetEdges_v2",
        "CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges",
        "cuGraphGetEdges 12030", LOCAL,
    ),
    function("cuGraphGetNodes", "CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes", "cuGraphGetNodes 10000", LOCAL),
    function(
        "cuGraphGetRootNodes", "CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes",
        "cuGraphGetRootNodes 10000", LOCAL,
    ),
    function(
        "cuGraphHostNodeGetParams", "CUgraphNode hNode, CUDA_HOST_NODE_PARAMS_v1 *nodeParams",
        "cuGraphHostNodeGetParams 10000", LOCAL,
    ),
    function(
        "cuGraphHostNodeSetParams", "CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS_v1 *nodeParams",
        "cuGraphHostNodeSetParams 10000", LOCAL,
    ),
    function(
        "cuGraphInstantiate",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize",
        "cuGraphInstantiate 10000", alias="cuGraphInstantiate_v2",
    ),
    function(
        "cuGraphInstantiateWithFlags", "CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags",
        "cuGraphInstantiateWithFlags 11040", ASYNC, "graph_instantiate",
    ),
    function(
        "cuGraphInstantiateWithParams",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams",
        "cuGraphInstantiateWithParams 12000 ptsz 12000", ASYNC, "graph_instantiate",
    ),
    function(
        "cuGraphInstantiate_v2",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize",
        "cuGraphInstantiate 11000", ASYNC, "graph_instantiate",
    ),
    function(
        "cuGraphKernelNodeCopyAttributes", "CUgraphNode dst, CUgraphNode src",
        "cuGraphKernelNodeCopyAttributes 11000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeGetAttribute",
        "CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out",
        "cuGraphKernelNodeGetAttribute 11000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeGetParams", "CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams",
        "cuGraphKernelNodeGetParams 10000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeGetParams_v2", "CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v2 *nodeParams",
        "cuGraphKernelNodeGetParams 12000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeSetAttribute",
        "CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value",
        "cuGraphKernelNodeSetAttribute 11000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeSetParams", "CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams",
        "cuGraphKernelNodeSetParams 10000", LOCAL,
    ),
    function(
        "cuGraphKernelNodeSetParams_v2", "CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v2 *nodeParams",
        "cuGraphKernelNodeSetParams 12000", LOCAL,
    ),
    function(
        "cuGraphLaunch", "CUgraphExec hGraph, CUstream hStream", "cuGraphLaunch 10000 ptsz 10000",
        ASYNC, "graph_launch graph_exec_update",
        "nodes that touch host memory, host functions and events are given as calls of their own",
    ),
    function(
        "cuGraphMemAllocNodeGetParams", "CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS_v1 *params_out",
        "cuGraphMemAllocNodeGetParams 11040", LOCAL,
    ),
    function(
        "cuGraphMemFreeNodeGetParams", "CUgraphNode hNode, CUdeviceptr *dptr_out",
        "cuGraphMemFreeNodeGetParams 11040", LOCAL,
    ),
    function(
        "cuGraphMemcpyNodeGetParams", "CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams",
        "cuGraphMemcpyNodeGetParams 10000", LOCAL,
    ),
    function(
        "cuGraphMemcpyNodeSetParams", "CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams",
        "cuGraphMemcpyNodeSetParams 10000", LOCAL,
    ),
    function(
        "cuGraphMemsetNodeGetParams", "CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS_v1 *nodeParams",
        "cuGraphMemsetNodeGetParams 10000", LOCAL,
    ),
    function(
        "cuGraphMemsetNodeSetParams", "CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS_v1 *nodeParams",
        "cuGraphMemsetNodeSetParams 10000", LOCAL,
    ),
    function(
        "cuGraphNodeFindInClone", "CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph",
        "cuGraphNodeFindInClone 10000", LOCAL,
    ),
    function(
        "cuGraphNodeGetDependencies", "CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies",
        "cuGraphNodeGetDependencies 10000", LOCAL,
    ),
    function(
        "cuGraphNodeGetDependencies_v2",
        "CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData, size_t *numDependencies",
        "cuGraphNodeGetDependencies 12030", LOCAL,
    ),
    function(
        "cuGraphNodeGetDependentNodes", "CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes",
        "cuGraphNodeGetDependentNodes 10000", LOCAL,
    ),
    function(
        "cuGraphNodeGetDependentNodes_v2",
        "CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData, size_t *numDependentNodes",
        "cuGraphNodeGetDependentNodes 12030", LOCAL,
    ),
    function(
        "cuGraphNodeGetEnabled", "CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled",
        "cuGraphNodeGetEnabled 11060", LOCAL,
    ),
    function("cuGraphNodeGetType", "CUgraphNode hNode, CUgraphNodeType *type", "cuGraphNodeGetType 10000", LOCAL),
    function(
        "cuGraphNodeSetEnabled", "CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled",
        "cuGraphNodeSetEnabled 11060", LOCAL,
    ),
    function(
        "cuGraphNodeSetParams", "CUgraphNode hNode, CUgraphNodeParams *nodeParams", "cuGraphNodeSetParams 12020",
        LOCAL,
    ),
    function(
        "cuGraphReleaseUserObject", "CUgraph graph, CUuserObject object, unsigned int count",
        "cuGraphReleaseUserObject 11030", LOCAL,
    ),
    function(
        "cuGraphRemoveDependencies",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies",
        "cuGraphRemoveDependencies 10000", LOCAL,
    ),
    function(
        "cuGraphRemoveDependencies_v2",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData, "
        "size_t numDependencies", "cuGraphRemoveDependencies 12030", LOCAL,
    ),
    function(
        "cuGraphRetainUserObject", "CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags",
        "cuGraphRetainUserObject 11030", LOCAL,
    ),
    function("cuGraphUpload", "CUgraphExec hGraph, CUstream hStream", "cuGraphUpload 11010 ptsz 11010", LOCAL),
    function(
        "cuUserObjectCreate",
        "CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount, unsigned int flags",
        "cuUserObjectCreate 11030", LOCAL,
    ),
    function("cuUserObjectRelease", "CUuserObject object, unsigned int count", "cuUserObjectRelease 11030", LOCAL),
    function("cuUserObjectRetain", "CUuserObject object, unsigned int count", "cuUserObjectRetain 11030", LOCAL),
)
