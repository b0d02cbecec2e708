"""Driver functions: graphs, conditional nodes and user objects."""

from __future__ import annotations

from rgpu.session.calls.functions.model import function

FUNCTIONS = (
    function(
        "cuDeviceGetGraphMemAttribute", "CUdevice device, CUgraphMem_attribute attr, void *value",
        "cuDeviceGetGraphMemAttribute 11040",
    ),
    function("cuDeviceGraphMemTrim", "CUdevice device", "cuDeviceGraphMemTrim 11040"),
    function(
        "cuDeviceSetGraphMemAttribute", "CUdevice device, CUgraphMem_attribute attr, void *value",
        "cuDeviceSetGraphMemAttribute 11040",
    ),
    function(
        "cuGraphAddBatchMemOpNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams", "cuGraphAddBatchMemOpNode 11070",
    ),
    function(
        "cuGraphAddChildGraphNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUgraph childGraph", "cuGraphAddChildGraphNode 10000",
    ),
    function(
        "cuGraphAddDependencies",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies",
        "cuGraphAddDependencies 10000",
    ),
    function(
        "cuGraphAddDependencies_v2",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData, "
        "size_t numDependencies", "cuGraphAddDependencies 12030",
    ),
    function(
        "cuGraphAddEmptyNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies",
        "cuGraphAddEmptyNode 10000",
    ),
    function(
        "cuGraphAddEventRecordNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUevent event", "cuGraphAddEventRecordNode 11010",
    ),
    function(
        "cuGraphAddEventWaitNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUevent event", "cuGraphAddEventWaitNode 11010",
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
        "const CUDA_HOST_NODE_PARAMS *nodeParams", "cuGraphAddHostNode 10000",
    ),
    function(
        "cuGraphAddKernelNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_KERNEL_NODE_PARAMS *nodeParams", "cuGraphAddKernelNode 10000",
    ),
    function(
        "cuGraphAddKernelNode_v2",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_KERNEL_NODE_PARAMS *nodeParams", "cuGraphAddKernelNode 12000",
    ),
    function(
        "cuGraphAddMemAllocNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams", "cuGraphAddMemAllocNode 11040",
    ),
    function(
        "cuGraphAddMemFreeNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUdeviceptr dptr", "cuGraphAddMemFreeNode 11040",
    ),
    function(
        "cuGraphAddMemcpyNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_MEMCPY3D *copyParams, CUcontext ctx", "cuGraphAddMemcpyNode 10000",
    ),
    function(
        "cuGraphAddMemsetNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx", "cuGraphAddMemsetNode 10000",
    ),
    function(
        "cuGraphAddNode",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, "
        "CUgraphNodeParams *nodeParams", "cuGraphAddNode 12020",
    ),
    function(
        "cuGraphAddNode_v2",
        "CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData "
        "*dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams", "cuGraphAddNode 12030",
    ),
    function(
        "cuGraphBatchMemOpNodeGetParams", "CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out",
        "cuGraphBatchMemOpNodeGetParams 11070",
    ),
    function(
        "cuGraphBatchMemOpNodeSetParams", "CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams",
        "cuGraphBatchMemOpNodeSetParams 11070",
    ),
    function(
        "cuGraphChildGraphNodeGetGraph", "CUgraphNode hNode, CUgraph *phGraph", "cuGraphChildGraphNodeGetGraph 10000",
    ),
    function("cuGraphClone", "CUgraph *phGraphClone, CUgraph originalGraph", "cuGraphClone 10000"),
    function(
        "cuGraphConditionalHandleCreate",
        "CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext ctx, unsigned int "
        "defaultLaunchValue, unsigned int flags", "cuGraphConditionalHandleCreate 12030",
    ),
    function("cuGraphCreate", "CUgraph *phGraph, unsigned int flags", "cuGraphCreate 10000"),
    function(
        "cuGraphDebugDotPrint", "CUgraph hGraph, const char *path, unsigned int flags", "cuGraphDebugDotPrint 11030",
    ),
    function("cuGraphDestroy", "CUgraph hGraph", "cuGraphDestroy 10000"),
    function("cuGraphDestroyNode", "CUgraphNode hNode", "cuGraphDestroyNode 10000"),
    function(
        "cuGraphEventRecordNodeGetEvent", "CUgraphNode hNode, CUevent *event_out",
        "cuGraphEventRecordNodeGetEvent 11010",
    ),
    function(
        "cuGraphEventRecordNodeSetEvent", "CUgraphNode hNode, CUevent event", "cuGraphEventRecordNodeSetEvent 11010",
    ),
    function(
        "cuGraphEventWaitNodeGetEvent", "CUgraphNode hNode, CUevent *event_out", "cuGraphEventWaitNodeGetEvent 11010",
    ),
    function(
        "cuGraphEventWaitNodeSetEvent", "CUgraphNode hNode, CUevent event", "cuGraphEventWaitNodeSetEvent 11010",
    ),
    function(
        "cuGraphExecBatchMemOpNodeSetParams",
        "CUgraphExec graphExec, CUgraphNode node, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams",
        "cuGraphExecBatchMemOpNodeSetParams 11070",
    ),
    function(
        "cuGraphExecChildGraphNodeSetParams", "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph",
        "cuGraphExecChildGraphNodeSetParams 11010",
    ),
    function("cuGraphExecDestroy", "CUgraphExec hGraphExec", "cuGraphExecDestroy 10000"),
    function(
        "cuGraphExecEventRecordNodeSetEvent", "CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event",
        "cuGraphExecEventRecordNodeSetEvent 11010",
    ),
    function(
        "cuGraphExecEventWaitNodeSetEvent", "CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event",
        "cuGraphExecEventWaitNodeSetEvent 11010",
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
    function("cuGraphExecGetFlags", "CUgraphExec hGraphExec, uint64_t *flags", "cuGraphExecGetFlags 12000"),
    function(
        "cuGraphExecHostNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams",
        "cuGraphExecHostNodeSetParams 10020",
    ),
    function(
        "cuGraphExecKernelNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphExecKernelNodeSetParams 10010",
    ),
    function(
        "cuGraphExecKernelNodeSetParams_v2",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphExecKernelNodeSetParams 12000",
    ),
    function(
        "cuGraphExecMemcpyNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx",
        "cuGraphExecMemcpyNodeSetParams 10020",
    ),
    function(
        "cuGraphExecMemsetNodeSetParams",
        "CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx",
        "cuGraphExecMemsetNodeSetParams 10020",
    ),
    function(
        "cuGraphExecNodeSetParams", "CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams",
        "cuGraphExecNodeSetParams 12020",
    ),
    function(
        "cuGraphExecUpdate",
        "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult "
        "*updateResult_out", "cuGraphExecUpdate 10020",
    ),
    function(
        "cuGraphExecUpdate_v2", "CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo",
        "cuGraphExecUpdate 12000",
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
        "cuGraphGetEdges 10000",
    ),
    function(
        "cuGraphGetEdges_v2",
        "CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges",
        "cuGraphGetEdges 12030",
    ),
    function("cuGraphGetNodes", "CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes", "cuGraphGetNodes 10000"),
    function(
        "cuGraphGetRootNodes", "CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes",
        "cuGraphGetRootNodes 10000",
    ),
    function(
        "cuGraphHostNodeGetParams", "CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams",
        "cuGraphHostNodeGetParams 10000",
    ),
    function(
        "cuGraphHostNodeSetParams", "CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams",
        "cuGraphHostNodeSetParams 10000",
    ),
    function(
        "cuGraphInstantiate",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize",
        "cuGraphInstantiate 10000",
    ),
    function(
        "cuGraphInstantiateWithFlags", "CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags",
        "cuGraphInstantiateWithFlags 11040",
    ),
    function(
        "cuGraphInstantiateWithParams",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams",
        "cuGraphInstantiateWithParams 12000 ptsz 12000",
    ),
    function(
        "cuGraphInstantiate_v2",
        "CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize",
        "cuGraphInstantiate 11000",
    ),
    function(
        "cuGraphKernelNodeCopyAttributes", "CUgraphNode dst, CUgraphNode src",
        "cuGraphKernelNodeCopyAttributes 11000",
    ),
    function(
        "cuGraphKernelNodeGetAttribute",
        "CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out",
        "cuGraphKernelNodeGetAttribute 11000",
    ),
    function(
        "cuGraphKernelNodeGetParams", "CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphKernelNodeGetParams 10000",
    ),
    function(
        "cuGraphKernelNodeGetParams_v2", "CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphKernelNodeGetParams 12000",
    ),
    function(
        "cuGraphKernelNodeSetAttribute",
        "CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value",
        "cuGraphKernelNodeSetAttribute 11000",
    ),
    function(
        "cuGraphKernelNodeSetParams", "CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphKernelNodeSetParams 10000",
    ),
    function(
        "cuGraphKernelNodeSetParams_v2", "CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams",
        "cuGraphKernelNodeSetParams 12000",
    ),
    function("cuGraphLaunch", "CUgraphExec hGraph, CUstream hStream", "cuGraphLaunch 10000 ptsz 10000"),
    function(
        "cuGraphMemAllocNodeGetParams", "CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out",
        "cuGraphMemAllocNodeGetParams 11040",
    ),
    function(
        "cuGraphMemFreeNodeGetParams", "CUgraphNode hNode, CUdeviceptr *dptr_out",
        "cuGraphMemFreeNodeGetParams 11040",
    ),
    function(
        "cuGraphMemcpyNodeGetParams", "CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams",
        "cuGraphMemcpyNodeGetParams 10000",
    ),
    function(
        "cuGraphMemcpyNodeSetParams", "CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams",
        "cuGraphMemcpyNodeSetParams 10000",
    ),
    function(
        "cuGraphMemsetNodeGetParams", "CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams",
        "cuGraphMemsetNodeGetParams 10000",
    ),
    function(
        "cuGraphMemsetNodeSetParams", "CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams",
        "cuGraphMemsetNodeSetParams 10000",
    ),
    function(
        "cuGraphNodeFindInClone", "CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph",
        "cuGraphNodeFindInClone 10000",
    ),
    function(
        "cuGraphNodeGetDependencies", "CUgraphNode hNode, CUgraphNode *dependencies, size_t *numDependencies",
        "cuGraphNodeGetDependencies 10000",
    ),
    function(
        "cuGraphNodeGetDependencies_v2",
        "CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData, size_t *numDependencies",
        "cuGraphNodeGetDependencies 12030",
    ),
    function(
        "cuGraphNodeGetDependentNodes", "CUgraphNode hNode, CUgraphNode *dependentNodes, size_t *numDependentNodes",
        "cuGraphNodeGetDependentNodes 10000",
    ),
    function(
        "cuGraphNodeGetDependentNodes_v2",
        "CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData, size_t *numDependentNodes",
        "cuGraphNodeGetDependentNodes 12030",
    ),
    function(
        "cuGraphNodeGetEnabled", "CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled",
        "cuGraphNodeGetEnabled 11060",
    ),
    function("cuGraphNodeGetType", "CUgraphNode hNode, CUgraphNodeType *type", "cuGraphNodeGetType 10000"),
    function(
        "cuGraphNodeSetEnabled", "CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled",
        "cuGraphNodeSetEnabled 11060",
    ),
    function(
        "cuGraphNodeSetParams", "CUgraphNode hNode, CUgraphNodeParams *nodeParams", "cuGraphNodeSetParams 12020",
    ),
    function(
        "cuGraphReleaseUserObject", "CUgraph graph, CUuserObject object, unsigned int count",
        "cuGraphReleaseUserObject 11030",
    ),
    function(
        "cuGraphRemoveDependencies",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies",
        "cuGraphRemoveDependencies 10000",
    ),
    function(
        "cuGraphRemoveDependencies_v2",
        "CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData, "
        "size_t numDependencies", "cuGraphRemoveDependencies 12030",
    ),
    function(
        "cuGraphRetainUserObject", "CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags",
        "cuGraphRetainUserObject 11030",
    ),
    function("cuGraphUpload", "CUgraphExec hGraph, CUstream hStream", "cuGraphUpload 11010 ptsz 11010"),
    function(
        "cuUserObjectCreate",
        "CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount, unsigned int flags",
        "cuUserObjectCreate 11030",
    ),
    function("cuUserObjectRelease", "CUuserObject object, unsigned int count", "cuUserObjectRelease 11030"),
    function("cuUserObjectRetain", "CUuserObject object, unsigned int count", "cuUserObjectRetain 11030"),
)
