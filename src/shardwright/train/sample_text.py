"""The text that a trained model writes after run.sample_prompt, at the end of a run."""

from shardwright.config.base import RunError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import Replica
from shardwright.train.data.tokenizer import load_tokenizer
from shardwright.train.prompt import begun
from shardwright.train.text_generation import generate


def sample_text(job: JobSpec, replica: Replica, mesh: Mesh) -> str:
    """The text of the model after run.sample_prompt. The first replica writes; the others return an empty string."""
    if job.run.sample_tokens == 0:
        return ""
    with replica.gathered():  # all replicas have a part in this, and then one writes
        if mesh.dp.index > 0 and job.plan.ep == 1:  # experts may be on several replicas, which then write the same
            return ""
        tokenizer = load_tokenizer(job.data)
        prompt, num_hidden = begun(tokenizer, tokenizer.encode(job.run.sample_prompt).tolist())
        ids = generate(
            replica.stages, replica.evaluation, mesh, list(prompt), num_tokens=job.run.sample_tokens, seed=job.run.seed
        )
        try:
            return tokenizer.decode(ids[num_hidden:]) if mesh.dp.index == 0 else ""
        except RunError as error:  # the run is done, and its weights are what was wanted
            return f"(none: {error})"
