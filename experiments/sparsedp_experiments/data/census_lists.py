"""The public lists of the census tables' columns: UCI's `adult.names` and `census-income.names`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


def _columns(text: str) -> Mapping[str, tuple[str, ...]]:
    """From paragraphs "column: level; level; ...", wrapped anywhere."""
    found = {}
    for paragraph in text.strip().split("\n\n"):
        column, _, levels = " ".join(paragraph.split()).partition(": ")
        found[column] = tuple(levels.split("; "))
    return MappingProxyType(found)


ADULT = _columns("""
workclass: Private; Self-emp-not-inc; Self-emp-inc; Federal-gov; Local-gov; State-gov; Without-pay;
Never-worked

education: Bachelors; Some-college; 11th; HS-grad; Prof-school; Assoc-acdm; Assoc-voc; 9th; 7th-8th; 12th;
Masters; 1st-4th; 10th; Doctorate; 5th-6th; Preschool

marital-status: Married-civ-spouse; Divorced; Never-married; Separated; Widowed; Married-spouse-absent;
Married-AF-spouse

occupation: Tech-support; Craft-repair; Other-service; Sales; Exec-managerial; Prof-specialty;
Handlers-cleaners; Machine-op-inspct; Adm-clerical; Farming-fishing; Transport-moving; Priv-house-serv;
Protective-serv; Armed-Forces

relationship: Wife; Own-child; Husband; Not-in-family; Other-relative; Unmarried

race: White; Asian-Pac-Islander; Amer-Indian-Eskimo; Other; Black

sex: Female; Male

native-country: United-States; Cambodia; England; Puerto-Rico; Canada; Germany; Outlying-US(Guam-USVI-etc);
India; Japan; Greece; South; China; Cuba; Iran; Honduras; Philippines; Italy; Poland; Jamaica; Vietnam;
Mexico; Portugal; Ireland; France; Dominican-Republic; Laos; Ecuador; Taiwan; Haiti; Columbia; Hungary;
Guatemala; Nicaragua; Scotland; Thailand; Yugoslavia; El-Salvador; Trinadad&Tobago; Peru; Hong;
Holand-Netherlands
""")

COUNTRIES = _columns("""
country: Cambodia; Canada; China; Columbia; Cuba; Dominican-Republic; Ecuador; El-Salvador; England; France;
Germany; Greece; Guatemala; Haiti; Holand-Netherlands; Honduras; Hong Kong; Hungary; India; Iran; Ireland;
Italy; Jamaica; Japan; Laos; Mexico; Nicaragua; Outlying-U S (Guam USVI etc); Panama; Peru; Philippines;
Poland; Portugal; Puerto-Rico; Scotland; South Korea; Taiwan; Thailand; Trinadad&Tobago; United-States;
Vietnam; Yugoslavia
""")["country"]

CENSUS_INCOME = _columns("""
class of worker: Federal government; Local government; Never worked; Not in universe; Private;
Self-employed-incorporated; Self-employed-not incorporated; State government; Without pay

education: 10th grade; 11th grade; 12th grade no diploma; 1st 2nd 3rd or 4th grade; 5th or 6th grade; 7th
and 8th grade; 9th grade; Associates degree-academic program; Associates degree-occup /vocational; Bachelors
degree(BA AB BS); Children; Doctorate degree(PhD EdD); High school graduate; Less than 1st grade; Masters
degree(MA MS MEng MEd MSW MBA); Prof school degree (MD DDS DVM LLB JD); Some college but no degree

enroll in edu inst last wk: College or university; High school; Not in universe

marital stat: Divorced; Married-A F spouse present; Married-civilian spouse present; Married-spouse absent;
Never married; Separated; Widowed

major industry code: Agriculture; Armed Forces; Business and repair services; Communications; Construction;
Education; Entertainment; Finance insurance and real estate; Forestry and fisheries; Hospital services;
Manufacturing-durable goods; Manufacturing-nondurable goods; Medical except hospital; Mining; Not in
universe or children; Other professional services; Personal services except private HH; Private household
services; Public administration; Retail trade; Social services; Transportation; Utilities and sanitary
services; Wholesale trade

major occupation code: Adm support including clerical; Armed Forces; Executive admin and managerial; Farming
forestry and fishing; Handlers equip cleaners etc; Machine operators assmblrs & inspctrs; Not in universe;
Other service; Precision production craft & repair; Private household services; Professional specialty;
Protective services; Sales; Technicians and related support; Transportation and material moving

race: Amer Indian Aleut or Eskimo; Asian or Pacific Islander; Black; Other; White

hispanic origin: All other; Central or South American; Chicano; Cuban; Do not know; Mexican (Mexicano);
Mexican-American; NA; Other Spanish; Puerto Rican

sex: Female; Male

member of a labor union: No; Not in universe; Yes

reason for unemployment: Job leaver; Job loser - on layoff; New entrant; Not in universe; Other job loser;
Re-entrant

full or part time employment stat: Children or Armed Forces; Full-time schedules; Not in labor force; PT for
econ reasons usually FT; PT for econ reasons usually PT; PT for non-econ reasons usually FT; Unemployed
full-time; Unemployed part- time

tax filer stat: Head of household; Joint both 65+; Joint both under 65; Joint one under 65 & one 65+;
Nonfiler; Single

region of previous residence: Abroad; Midwest; Northeast; Not in universe; South; West

state of previous residence: Abroad; Alabama; Alaska; Arizona; Arkansas; California; Colorado; Connecticut;
Delaware; District of Columbia; Florida; Georgia; Idaho; Illinois; Indiana; Iowa; Kansas; Kentucky;
Louisiana; Maine; Maryland; Massachusetts; Michigan; Minnesota; Mississippi; Missouri; Montana; Nebraska;
Nevada; New Hampshire; New Jersey; New Mexico; New York; North Carolina; North Dakota; Not in universe;
Ohio; Oklahoma; Oregon; Pennsylvania; South Carolina; South Dakota; Tennessee; Texas; Utah; Vermont;
Virginia; West Virginia; Wisconsin; Wyoming

detailed household and family stat: Child 18+ ever marr Not in a subfamily; Child 18+ ever marr RP of
subfamily; Child 18+ never marr Not in a subfamily; Child 18+ never marr RP of subfamily; Child 18+ spouse
of subfamily RP; Child <18 ever marr RP of subfamily; Child <18 ever marr not in subfamily; Child <18 never
marr RP of subfamily; Child <18 never marr not in subfamily; Child <18 spouse of subfamily RP; Child under
18 of RP of unrel subfamily; Grandchild 18+ ever marr RP of subfamily; Grandchild 18+ ever marr not in
subfamily; Grandchild 18+ never marr RP of subfamily; Grandchild 18+ never marr not in subfamily; Grandchild
18+ spouse of subfamily RP; Grandchild <18 ever marr not in subfamily; Grandchild <18 never marr RP of
subfamily; Grandchild <18 never marr child of subfamily RP; Grandchild <18 never marr not in subfamily;
Householder; In group quarters; Nonfamily householder; Other Rel 18+ ever marr RP of subfamily; Other Rel
18+ ever marr not in subfamily; Other Rel 18+ never marr RP of subfamily; Other Rel 18+ never marr not in
subfamily; Other Rel 18+ spouse of subfamily RP; Other Rel <18 ever marr RP of subfamily; Other Rel <18 ever
marr not in subfamily; Other Rel <18 never marr child of subfamily RP; Other Rel <18 never marr not in
subfamily; Other Rel <18 never married RP of subfamily; Other Rel <18 spouse of subfamily RP; RP of
unrelated subfamily; Secondary individual; Spouse of RP of unrelated subfamily; Spouse of householder

detailed household summary in household: Child 18 or older; Child under 18 ever married; Child under 18
never married; Group Quarters- Secondary individual; Householder; Nonrelative of householder; Other relative
of householder; Spouse of householder

migration code-change in msa: Abroad to MSA; Abroad to nonMSA; MSA to MSA; MSA to nonMSA; NonMSA to MSA;
NonMSA to nonMSA; Nonmover; Not identifiable; Not in universe

migration code-change in reg: Abroad; Different county same state; Different division same region; Different
region; Different state same division; Nonmover; Not in universe; Same county

migration code-move within reg: Abroad; Different county same state; Different state in Midwest; Different
state in Northeast; Different state in South; Different state in West; Nonmover; Not in universe; Same
county

live in this house 1 year ago: No; Not in universe under 1 year old; Yes

migration prev res in sunbelt: No; Not in universe; Yes

family members under 18: Both parents present; Father only present; Mother only present; Neither parent
present; Not in universe

citizenship: Foreign born- Not a citizen of U S; Foreign born- U S citizen by naturalization; Native- Born
abroad of American Parent(s); Native- Born in Puerto Rico or U S Outlying; Native- Born in the United States

own business or self employed: 0; 1; 2

fill inc questionnaire for veteran's admin: No; Not in universe; Yes

veterans benefits: 0; 1; 2

year: 94; 95
""")
