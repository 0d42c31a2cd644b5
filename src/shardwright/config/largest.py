"""The largest values of a job's fields, and the smallest values of divisors: one table, for all fields.

Each limit is well above anything that is built or planned, and low enough that computing with it takes seconds and less
than a gigabyte. Fields take their limits from here, so that a fault names the limit. Numbers that follow from several
fields have limits too: config/checks/check_size.py checks a job, and schedule/shape_program.py the shape of a pipeline.
"""

# --- the model ---

LAYERS = 2**11  # 118 in the deepest released model; 1,000 in DeepNet (Wang et al. 2022, arXiv 2203.00555)
WIDTH = 2**22  # of the residual stream, of a head, inside an MLP: 53,248 in Llama 3 405B
HEADS = 2**16
EXPERTS = 2**22  # of a layer: 1,048,576 in PEER (He 2024, arXiv 2407.04153)
VOCAB = 2**28
SEQUENCE = 2**30  # tokens

# --- the plan and the cluster ---

COLLECTIVE_BYTES = 2**50  # of a tensor of one collective
RANKS = 2**24  # of a job, and devices of a cluster
PIPELINE_RANKS = 2**10
BATCH = 2**30  # sequences in a step
STEPS = 10**9
SAMPLES = 2**50  # sequences of a run
PARTS = 2**10  # of a cluster
SWITCH_LEVELS = 16
TORUS_AXES = 8
ADAPTERS = 2**8  # of a server
MEMORY_GIB, LEAST_MEMORY_GIB = 2.0**30, 1e-3  # names of devices say three decimals: h100-sxm@94.5gib
BUCKET_MIB, LEAST_BUCKET_MIB = 2.0**30, 1e-6
BUFFERED_ELEMENTS = 1e12  # of gradients that wait, or of parameters that are gathered
SECONDS = 1e8
LOSS_SCALE = 2.0**48
RESTARTS = 10**6
FALLBACKS = 2**6  # plans for other numbers of ranks
HISTORY = 2**16  # steps of a delayed fp8 scale
SOURCES = 2**10  # of a mixture
SHOWN_PLANS = 100  # each takes tenths of a second to find
WORKERS = 2**10  # processes that turn text into tokens

# --- factors and rates ---

FACTOR, LEAST_FACTOR = 1e9, 1e-30  # of factors and addends: learning rates, coefficients, epsilons
RATE, LEAST_RATE = 1e12, 1e-9  # of links, memory and products, in the unit of the field

BYTES_BY_ELEMENT = 1e4  # that an operator of a generation of software moves or keeps
WORKSPACES = 2**20  # also for other small numbers of a generation of software
TABLE_SIZES = 64  # along a side of a measured table of a device
TABLES = 1024  # of a device

# --- numbers that follow from several fields ---

PARAMETERS = 10**16  # of a model
TOKENS = 2**40  # of a step
ACTIVATIONS = 2**62  # elements of a microbatch: tokens x width of the widest tensor x layers
COMPUTATIONS = 2**19  # of a step: stages x microbatches, each a forward and a backward
COMPARED = 2**13  # ranks x microbatches x steps, if every schedule is simulated
SEARCHED = 2**13  # stages x microbatches of a schedule that the solver makes (auto)

# --- options ---

COST, LEAST_COST = 1e9, 1e-9  # of an action of a schedule; 0 means no cost
SLOWER = 1000  # times as long as the others that a slow rank computes
VERIFIED_STEPS = 10**4  # steps whose results are all kept until they are compared
CLUSTER_SIZES = 64  # that `scale` tries
PICTURE = 50_000  # actions in an SVG: 10 MB
PAGE = 300_000  # actions, including messages, in a page or a trace: some 30 MB
