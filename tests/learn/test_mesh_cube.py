"""The cube of the mesh colours ranks as `explain` places them."""

from collections import Counter

from shardwright.learn.mesh_cube_figure import mesh_cubes
from shardwright.sharding.groups import CP, DP, PP, TP


def test_each_view_has_all_ranks_and_its_lines_differ_along_one_axis() -> None:
    for cube in mesh_cubes():
        mesh = cube.mesh
        assert mesh.world == 32
        for kind, axis in ((TP, "tp"), (CP, "cp"), (DP, "dp"), (PP, "pp")):
            places = [mesh.coordinates(rank) for rank in cube.line(kind)]
            assert [place[axis] for place in places] == list(range(mesh.sizes[axis]))
            assert all(place | {axis: 0} == places[0] | {axis: 0} for place in places)


def test_experts_are_on_as_many_ranks_each_and_all_in_each_line() -> None:
    with_experts = mesh_cubes()[-1]
    places = with_experts.expert_places()
    assert Counter(places.values()) == dict.fromkeys(range(8), 4)
    stages = [{place for rank, place in places.items() if rank // 16 == stage} for stage in (0, 1)]
    assert stages == [set(range(8))] * 2
