"""Files of schedulers and clouds that hold the same command, each in its own way: 2 nodes of 8 GPUs, tensors over 4."""

import json

FLAGS = (
    "--tensor-model-parallel-size=4",
    "--num-layers=8",
    "--hidden-size=512",
    "--num-attention-heads=8",
    "--seq-length=1024",
    "--max-position-embeddings=1024",
    "--micro-batch-size=2",
    "--global-batch-size=32",
    "--bf16",
    "--vocab-size=50304",
    "--tokenizer-type=NullTokenizer",
    "--lr=1e-4",
    "--train-iters=10",
)
PROGRAM = ("pretrain_gpt.py", *FLAGS)
LAUNCH = ("torchrun", "--nnodes=2", "--nproc_per_node=8", *PROGRAM)
_LINE = " ".join(LAUNCH)
_GPUS = "{limits: {nvidia.com/gpu: 8}}"
_POD = f"template: {{spec: {{containers: [{{name: a, image: b, resources: {_GPUS}, command: %s}}]}}}}"


def _pods(replicas: object, command: object) -> str:
    return "{replicas: " + str(replicas) + ", " + _POD % json.dumps(command) + "}"


_SERVICE = "apiVersion: v1\nkind: Service\nspec: {ports: [{port: 1}]}\n---\n"
WRAPPED = {
    "pytorchjob.yaml": _SERVICE
    + "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Master: "
    + _pods(1, LAUNCH)
    + ", Worker: "
    + _pods(1, LAUNCH)
    + "}}\n",
    "inner.yaml": "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: "
    + _pods(2, ["/bin/bash", "-c", "python " + " ".join(PROGRAM)])
    + "}}\n",
    "mpijob.yaml": "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nspec: {mpiReplicaSpecs: {Launcher: {replicas: 1, "
    f"template: {{spec: {{containers: [{{args: {json.dumps(['mpirun', '-np', '16', 'python', *PROGRAM])}}}]}}}}}}, "
    "Worker: " + _pods(2, []) + "}}\n",
    "volcano.yaml": "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nspec: {tasks: [" + _pods(2, LAUNCH) + "]}\n",
    "trainjob.yaml": "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nspec: {trainer: {numNodes: 2, "
    f"resourcesPerNode: {_GPUS}, env: [{{name: TP, value: '4'}}], command: {json.dumps(LAUNCH)}}}}}\n",
    "sky.yaml": "resources: {accelerators: 'H100:8'}\nnum_nodes: 2\nsetup: pip install torch\nrun: |\n  cd here\n"
    f"  torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE {' '.join(PROGRAM)}\n",
    "amulet.yaml": "description: a\ntarget: {service: sing, name: c}\nenvironment: {image: x}\ncode: {local_dir: .}\n"
    "jobs:\n- name: j\n  sku: 2x80G8-A100-IB\n  process_count_per_node: 1\n  submit_args: {env: {TP: 4}}\n  command:\n"
    f"  - pip install torch\n  - {_LINE.replace('size=4', 'size=$$TP')}\n",
    "search.yaml": "target: {service: aml, name: c}\nsearch:\n  job_template:\n    sku: 2xG8\n    command:\n"
    f"    - {_LINE}\n  type: grid\n  params: [{{name: rank, spec: discrete, values: [0]}}]\n",
    "dstack.yml": "type: task\nnodes: 2\nenv: [TP=4, WANDB_API_KEY]\nresources: {gpu: 'H100:8'}\ncommands:\n"
    f"  - pip install torch\n  - {_LINE.replace('size=4', 'size=$TP')}\n",
    "azure.yml": "command: >-\n  python "
    + "\n  ".join(PROGRAM)
    + "\n  --save ${{outputs.here}}\ninputs: {lr: 1}\nenvironment: azureml:a@latest\ncompute: azureml:b\n"
    "distribution: {type: pytorch, process_count_per_instance: 8}\nresources: {instance_count: 2}\n",
    "compose.yaml": "services:\n  web: {image: x, command: serve}\n  train:\n    image: y\n    environment: [TP=4]\n"
    "    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 8, capabilities: [gpu]}]}}}\n"
    f"    command: {_LINE.replace('size=4', 'size=$TP')}\n",
    "determined.yaml": "name: d\nresources: {slots_per_trial: 8}\nenvironment: {environment_variables: [TP=4]}\n"
    "searcher: {name: single, metric: loss}\n"
    f"entrypoint: {json.dumps(['bash', '-c', _LINE.replace('=4', '=$TP', 1)])}\n",
    "mosaic.yaml": "name: m\nimage: x\ncompute: {gpus: 16, cluster: c}\nenv_variables: {TP: '4'}\ncommand: |-\n"
    f"  torchrun {' '.join(PROGRAM).replace('size=4', 'size=$TP')}\n",
    "beaker.yaml": "version: v2\nbudget: b\ntasks:\n- {name: t, replicas: 2, resources: {gpuCount: 8}, "
    f"command: [torchrun], arguments: {json.dumps(PROGRAM)}, envVars: [{{name: TP, value: '4'}}]}}\n",
    "vertex.yaml": "workerPoolSpecs:\n"
    + "".join(
        "- {machineSpec: {acceleratorCount: 8}, replicaCount: 1, containerSpec: {imageUri: x, "
        f"command: [torchrun], args: {json.dumps(PROGRAM)}}}}}\n"
        for _ in range(2)
    ),
    "Makefile": "TP ?= 4\nPROGRAM := pretrain_gpt.py\nFLAGS = \\\n\t--nnodes=2 --nproc_per_node=8\n.PHONY: train\n"
    "test: ## tests\n\t@python -m pytest -q\n\ntrain: data/$(TP) ## trains\n\t@mkdir -p out/$$USER\n"
    "\ttorchrun $(FLAGS) \\\n\t  $(PROGRAM) " + " ".join(FLAGS).replace("size=4", "size=$(TP)") + "\n",
    "GNUmakefile": "NODES ?= 2\nifeq ($(NODES),2)\nTP = 4\nMORE = --nnodes=2 --nproc_per_node=8\n"
    "else ifdef SMALL\nTP = 1\nelse\nTP = 8\nendif\ntrain:\nifneq '$(TP)' '4'\n\t@exit 1\nendif\n\ttorchrun $(MORE) "
    + " ".join(PROGRAM).replace("size=4", "size=$(TP)")
    + "\n",
    "justfile": 'tp := env_var_or_default("TP", "4")\ndefault:\n    @just --list\ntrain nodes="2" *further:\n'
    "    torchrun --nnodes={{nodes}} --nproc_per_node=8 \\\n      "
    + " ".join(PROGRAM).replace("size=4", "size={{ tp }}")
    + " {{further}}\n",
}
