# One image with JupyterLab, the tests and the grader, for Docker, JupyterHub, Binder and devcontainers. What is installed
# stands in requirements*.txt and constraints.txt alone. It holds the full edition, with all solutions.
#
#     docker build -t module-15 .
#     docker run --rm -p 8888:8888 module-15                                  # JupyterLab; its address is printed
#     docker run --rm module-15 make test
#
# A JupyterHub also needs its own version:  docker build --build-arg JUPYTERHUB=5.4.0 …
# With CUDA:  --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
FROM python:3.12-slim-bookworm

# make and git run the course's commands, g++ compiles what 15-05 and 15-06 generate
RUN apt-get update && apt-get install --yes --no-install-recommends git make g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 learner
ENV COURSE_ENV=current PIP_NO_CACHE_DIR=1

WORKDIR /home/learner/course
COPY . .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG JUPYTERHUB=
RUN pip install --extra-index-url "$TORCH_INDEX" -r requirements-dev.txt -c constraints.txt \
        ${JUPYTERHUB:+"jupyterhub==$JUPYTERHUB"} \
    && chown -R learner: /home/learner

USER learner
# the student edition, which Binder opens
RUN python -m course workbook
EXPOSE 8888
CMD ["python", "-m", "course", "lab", "--ServerApp.ip=0.0.0.0", "--no-browser"]
